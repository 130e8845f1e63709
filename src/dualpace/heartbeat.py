"""Signs of life of an engine, in a page of memory that it shares with its supervisor.

Two numbers: a beat, which grows with every turn of the engine's loop, and the oldest step or copy
under way. Neither side trusts the other's clock, so a machine that was frozen as a whole is not
taken for an engine that hangs. Knows neither processes nor what an engine does.
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

PAGE = 4096
BEATS, OLDEST = 0, 1
Silence = Literal["loop", "step"]


class Heartbeat:
    """The engine's end. `descriptor`: of the page, as inherited."""

    def __init__(self, descriptor: int) -> None:
        self._page = memoryview(mmap.mmap(descriptor, PAGE)).cast("Q")

    def __call__(self, oldest: int) -> None:
        """The loop has turned. oldest: number, from 1, of the oldest thing under way; 0: none."""
        self._page[OLDEST] = oldest
        self._page[BEATS] += 1


class Monitor:
    """The supervisor's end; makes the page. All durations are in seconds.

    loop_limit: without a beat; step_limit: with the same oldest step or copy. Time counts only as
    far as `check` was called meanwhile, no more than `max_gap` from one call to the next.
    """

    def __init__(self, loop_limit: float, step_limit: float, max_gap: float) -> None:
        self.descriptor = os.memfd_create("dualpace-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, PAGE)
        self._page = memoryview(mmap.mmap(self.descriptor, PAGE)).cast("Q")
        self._loop_limit = loop_limit
        self._step_limit = step_limit
        self._max_gap = max_gap
        self._last: tuple[int, int] = (0, 0)
        self._silent = self._busy = 0.0
        self._checked: float | None = None

    def check(self, now: float) -> Silence | None:
        """What has stood still for too long, if anything has."""
        gap = 0.0 if self._checked is None else min(now - self._checked, self._max_gap)
        self._checked = now
        seen = (self._page[BEATS], self._page[OLDEST])
        self._silent = self._silent + gap if seen[0] == self._last[0] else 0.0
        self._busy = self._busy + gap if seen[1] and seen[1] == self._last[1] else 0.0
        self._last = seen
        if self._silent > self._loop_limit:
            return "loop"
        return "step" if self._busy > self._step_limit else None

    def close(self) -> None:
        os.close(self.descriptor)
