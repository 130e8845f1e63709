"""A GGUF file: metadata values and tensors by name.

Knows the container, not what a model's keys or tensors mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from dualpace.core.errors import ModelError


class _Reader(GGUFReader):  # type: ignore[misc]  # gguf has no type information
    """GGUFReader over a plain array: numpy's memmap class makes each of its many slices slow."""

    data: Any

    def _build_fields(self, offs: int, count: int) -> int:
        self.data = self.data.view(np.ndarray)
        return int(super()._build_fields(offs, count))


class GGUFFile:
    """Read access to one GGUF file. Raises `ModelError` naming the file when it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ModelError(f"{path}: damaged or truncated GGUF file: {error}") from error
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key` (int, float, bool, str or list), or `default`."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def array_length(self, key: str) -> int:
        """Elements of the metadata array `key` without decoding them; 0 where it is absent."""
        field = self._reader.fields.get(key)
        if field is None or field.types[0] != GGUFValueType.ARRAY:
            return 0
        return len(field.data)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, slowest dimension first."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, dequantized to float32."""
        stored = self._tensor(name)
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            kind = stored.tensor_type.name
            raise ModelError(f"{self.path}: {name}: type {kind} is not supported") from error
        if not values.flags.writeable:
            values = values.copy()  # float32 as stored: a view of the read-only file
        return np.asarray(values, dtype=np.float32).reshape(self.shape(name))

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]
