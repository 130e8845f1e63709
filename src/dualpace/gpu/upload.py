"""Small host arrays to the device, and small results back, past the copy engines.

A copy between pinned memory and the device goes through a copy engine and waits there for every
page move of its direction, also for those that are asked for later: beside an unbroken stream of
promotions a step's inputs would never arrive. Small copies out of pageable memory travel with the
driver's commands instead, and the host may reuse such memory as soon as the call returns. Results
are written by a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COMMAND_BYTES = 64 * 1024  # the most that travels with a command
ALIGNMENT = 16  # bytes; of every array in the packed buffer


def upload(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`, in the order of its current stream."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = pack(arrays)
    on_device = torch.empty(len(packed), dtype=torch.uint8, device=device)
    send(packed, on_device)
    return views(on_device, arrays)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> Tensor:
    """All arrays behind each other in pageable memory: uint8 [bytes]."""
    buffer = np.empty(sum(_padded(array.nbytes) for array in arrays.values()), dtype=np.uint8)
    start = 0
    for array in arrays.values():
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        start += _padded(array.nbytes)
    return torch.from_numpy(buffer)


def send(packed: Tensor, target: Tensor) -> None:
    """Copy `pack`'s bytes to as many of the device's, in the order of the current stream."""
    for source, part in zip(packed.split(COMMAND_BYTES), target.split(COMMAND_BYTES), strict=True):
        part.copy_(source, non_blocking=True)


class StagedArrays:
    """Arrays with a place of their own on the device, filled on the host and sent together: the
    inputs of a graph."""

    def __init__(self, device: torch.device, **sizes: tuple[type[np.generic], int]) -> None:
        """sizes: dtype and length of each; zeros at first, on both sides."""
        arrays = {name: np.zeros(count, dtype) for name, (dtype, count) in sizes.items()}
        self._staged = pack(arrays)
        self._target = torch.zeros_like(self._staged, device=device)
        self.host = {name: part.numpy() for name, part in views(self._staged, arrays).items()}
        self.device = views(self._target, arrays)

    def fill(self, name: str, values: npt.NDArray[Any], rest: int | None = None) -> None:
        """The first of an array, and all behind them where `rest` is given."""
        array = self.host[name]
        array[: len(values)] = values
        if rest is not None:
            array[len(values) :] = rest

    def send(self, last: str, count: int) -> None:
        """All arrays up to the first `count` of `last`, in the order of the current stream. The
        host's side may be filled again at once."""
        part = self.device[last]
        end = (part.storage_offset() + count) * part.itemsize
        send(self._staged[:end], self._target[:end])


def fetch(values: Tensor) -> Tensor:
    """Start writing contiguous int64 or float64 of the device into pinned memory, in the order of
    the current stream; the memory must be kept until that is done."""
    from dualpace.gpu.triton_kernels import copy_words

    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    if values.numel():
        copy_words(values.view(torch.int64), on_host.view(torch.int64))
    return on_host


def views(packed: Tensor, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """The parts of a packed buffer, with the dtypes and shapes of `arrays`."""
    parts = {}
    start = 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array[:0]).dtype
        parts[name] = packed[start : start + array.nbytes].view(dtype).view(array.shape)
        start += _padded(array.nbytes)
    return parts


def _padded(size: int) -> int:
    """Bytes that `size` bytes take up in a packed buffer."""
    return -(-size // ALIGNMENT) * ALIGNMENT
