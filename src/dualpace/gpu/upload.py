"""Small host arrays to the device in one copy.

On CUDA the copy is asynchronous and from pinned memory of its own: torch's allocator of pinned
memory gives it to nobody else before the copy is done, so that the next step's arrays never
overwrite those of a step that still waits in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; of every array in the packed buffer


def upload(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`, in the order of its current stream."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = pack(arrays).to(device, non_blocking=True)
    return views(packed, arrays)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> Tensor:
    """All arrays behind each other in fresh pinned memory: uint8 [bytes]."""
    size = sum(padded(array.nbytes) for array in arrays.values())
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    buffer = packed.numpy()
    start = 0
    for array in arrays.values():
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        start += padded(array.nbytes)
    return packed


def views(packed: Tensor, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """The parts of a packed buffer, with the dtypes and shapes of `arrays`."""
    parts = {}
    start = 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array[:0]).dtype
        parts[name] = packed[start : start + array.nbytes].view(dtype).view(array.shape)
        start += padded(array.nbytes)
    return parts


def padded(size: int) -> int:
    """Bytes that `size` bytes take up in a packed buffer."""
    return -(-size // ALIGNMENT) * ALIGNMENT
