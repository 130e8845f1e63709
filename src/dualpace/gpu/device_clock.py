"""When the device came to an event, by the host's clock."""

from __future__ import annotations

from collections.abc import Callable

import torch


class DeviceClock:
    """clock: seconds, the host's. Events must have been made with `enable_timing`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._seconds = clock()

    def seconds(self, event: torch.cuda.Event) -> float:
        """Of an event that has passed."""
        milliseconds: float = self._origin.elapsed_time(event)
        return self._seconds + milliseconds * 1e-3
