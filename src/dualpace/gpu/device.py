"""Is there a CUDA device? Asked of the driver, so that the question costs no torch import."""

from __future__ import annotations

import ctypes


def cuda_device_count() -> int:
    """CUDA devices visible to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
