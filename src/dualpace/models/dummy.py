"""Random weights without a checkpoint, made as fast as memory can be filled, on any device.

All tensors of a seed are one block of normal values, repeated: a tensor starts at an offset that
its name gives, and its elements run through the block, over and over, row after row. The block's
length is a prime, so rows of a matrix start at different places; how the singular values of a
14336 × 4096 matrix are spread cannot be told from that of independent values.

Knows no torch; a device that holds the block can fill a tensor by copying, as `torch_weights` does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dualpace.models.tensors import Array, converted

PERIOD = 1_000_003
SCALE = np.float32(0.02)


class DummyBlock:
    """The values of one seed in one dtype: normal × 0.02."""

    def __init__(self, seed: int, dtype: np.dtype[Any]) -> None:
        generator = np.random.Generator(np.random.SFC64(seed % 2**64))
        values = generator.standard_normal(PERIOD, dtype=np.float32)
        self.values = converted(values * SCALE, dtype)  # [PERIOD]
        self._repeated = self.values

    def window(self, offset: int, count: int) -> Array:
        """`count` values from `offset` on, read-only. All windows share memory, which grows to the
        largest that was asked for."""
        if offset + count > len(self._repeated):
            self._repeated = np.resize(self.values, offset + count)
        window = self._repeated[offset : offset + count]
        window.flags.writeable = False
        return window


@dataclass(frozen=True)
class DummyTensor:
    """A `Weight` of repeated values: flat element i is `block.values[(offset + i) % PERIOD]`."""

    block: DummyBlock
    offset: int  # less than PERIOD
    shape: tuple[int, ...]

    @classmethod
    def named(cls, name: str, shape: tuple[int, ...], block: DummyBlock) -> DummyTensor:
        """The tensor of that name, whatever else the model has."""
        return cls(block, zlib.crc32(name.encode()) % PERIOD, shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.block.values.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        window = self.block.window(self.offset, prod(self.shape))
        return np.array(window.reshape(self.shape), dtype=dtype, copy=copy)
