"""Rows of bytes, some distance apart, from host memory to the device: one asynchronous call.

torch copies such a thing row by row or through a buffer; the driver does it at the link's rate.
"""

from __future__ import annotations

import ctypes

import torch

from dualpace.core.errors import EngineError
from dualpace.gpu.device import cuda_driver

_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_rows_to_device(
    source: int,
    source_pitch: int,
    target: int,
    target_pitch: int,
    width: int,
    rows: int,
    stream: torch.cuda.Stream,
) -> None:
    """Start copying `rows` rows of `width` bytes on `stream`.

    source, target: addresses in host and device memory; pitches: bytes from row to row. The host's
    memory must be registered with CUDA, or the call may wait. Raises `EngineError` where the driver
    refuses.
    """
    job = _Copy2D(
        source_kind=_HOST, source_host=source, source_pitch=source_pitch,
        target_kind=_DEVICE, target_device=target, target_pitch=target_pitch,
        width=width, height=rows,
    )  # fmt: skip
    handle = ctypes.c_void_p(stream.cuda_stream)
    error = cuda_driver().cuMemcpy2DAsync_v2(ctypes.byref(job), handle)
    if error:
        raise EngineError(f"the driver refused a copy of {rows} rows of {width} bytes: {error}")
