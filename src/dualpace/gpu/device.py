"""CUDA's driver library: what torch has no call for, and questions that cost no torch import."""

from __future__ import annotations

import ctypes
import os
from functools import cache


def cuda_device_count() -> int:
    """CUDA devices visible to this process; 0 without a driver."""
    try:
        driver = cuda_driver()
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def ask_for_queues() -> None:
    """Before anything of CUDA in a process: as many hardware queues as there may be. Streams that
    share one wait for each other, and for what the other waits for, be it the CPU engine."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@cache
def cuda_driver() -> ctypes.CDLL:
    """The driver's library. Raises `OSError` where there is none."""
    ask_for_queues()
    return ctypes.CDLL("libcuda.so.1")
