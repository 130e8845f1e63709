"""How fast plain copies between the host's pinned memory and the device are."""

from __future__ import annotations

import statistics
import time
from typing import Literal

import torch

from dualpace.gpu.gate import synchronize

REPEATS = 5
Direction = Literal["load", "store"]


def link_bandwidth(direction: Direction, size: int = 2**28) -> float:
    """Bytes per second of a copy of `size` bytes to (load) or from the device, the median of a few.

    Nothing else may be under way. Needs as much pinned memory, and as much of the device's.
    """
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if direction == "load" else (device, host)
    seconds = []
    for _ in range(1 + REPEATS):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return size / statistics.median(seconds[1:])
