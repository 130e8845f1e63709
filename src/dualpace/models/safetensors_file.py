"""A safetensors file: its tensors in the order of their bytes, each read when it is needed.

Knows the container, not what a tensor's name means. safetensors' own reader checks a file; the
bytes are read here, because it hands out nothing but whole copies: an engine wants them in staging
memory piece by piece, or as they lie in the page cache.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dualpace.core.errors import ModelError
from dualpace.models.tensors import Array, converted

READABLE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
READ_AHEAD = 64 * 2**20  # bytes to fetch from the disk beyond a tensor that is mapped


class SafetensorsFile:
    """Read access to one file, open as long as this or one of its tensors is referenced.

    Raises `ModelError` naming the file when it is missing, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy") as opened:
                self.names: list[str] = opened.offset_keys()  # in the order of their bytes
            self.descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.descriptor)
            self.mapping = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        except SafetensorError as error:
            raise ModelError(f"{path}: damaged or truncated safetensors file: {error}") from error
        # An eight-byte length and a JSON header, checked above, precede the tensors' bytes.
        self._data = 8 + int.from_bytes(self.mapping[:8], "little")
        self._header = json.loads(self.mapping[8 : self._data])

    def tensor(self, name: str, dtype: np.dtype[Any]) -> FileTensor:
        """A tensor of the file, to be read as `dtype`. Raises `ModelError` if there is none or its
        stored dtype is not supported."""
        if name not in self._header:
            raise ModelError(f"{self.path}: cannot read tensor {name}: the file has none")
        entry = self._header[name]
        stored = READABLE.get(entry["dtype"])
        if stored is None:
            kinds = ", ".join(READABLE)
            raise ModelError(
                f"{self.path}: {name} is stored as {entry['dtype']}, supported: {kinds}"
            )
        offset = self._data + entry["data_offsets"][0]
        return FileTensor(self, name, tuple(entry["shape"]), stored, dtype, offset)


@dataclass(frozen=True)
class FileTensor:
    """A `Weight` that lies in a file."""

    file: SafetensorsFile
    name: str  # as stored
    shape: tuple[int, ...]
    stored: np.dtype[Any]
    dtype: np.dtype[Any]  # of the array
    offset: int  # of the first byte in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes) with the stored bytes from `start` on. Lets other threads run.

        Raises `ModelError` when they cannot be read.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.file.descriptor, [buffer[done:]], self.offset + start + done)
            except OSError as error:
                raise ModelError(
                    f"{self.file.path}: cannot read tensor {self.name}: {error}"
                ) from error
            if count == 0:
                raise ModelError(f"{self.file.path}: the file ends within tensor {self.name}")
            done += count

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Pages of the file itself where neither dtype nor alignment asks for a copy."""
        size = prod(self.shape) * self.stored.itemsize
        page = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(self.offset + size + READ_AHEAD, len(self.file.mapping)) - page
        self.file.mapping.madvise(mmap.MADV_WILLNEED, page, length)
        stored = np.frombuffer(self.file.mapping, np.uint8, size, self.offset).view(self.stored)
        array = converted(stored.reshape(self.shape), self.dtype)
        return np.array(array, dtype=dtype, copy=copy)
