"""Words in host memory that a stream waits for and writes: memory operations of CUDA's driver.

They can be captured into a graph. A word must lie in memory that is registered with CUDA; the host
sees what is written in the order of the stream.
"""

from __future__ import annotations

import ctypes

import torch

from dualpace.core.errors import EngineError
from dualpace.gpu.device import cuda_driver

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


def stream_waits_for(address: int, value: int) -> None:
    """The current stream goes on once the 32-bit word at `address` is `value`."""
    _call("cuStreamWaitValue32_v2", address, value, _EQUAL)


def stream_writes(address: int, value: int) -> None:
    """The current stream writes the 32-bit word at `address`, after all that it did before."""
    _call("cuStreamWriteValue32_v2", address, value, 0)


def _call(name: str, address: int, value: int, flags: int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = getattr(cuda_driver(), name)(
        stream, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags)
    )
    if error:
        raise EngineError(f"{name} failed with CUDA's error {error}")
