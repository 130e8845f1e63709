"""Virtual time: events in order, and nothing happens between them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Calls what was scheduled, in order of time and, at equal times, of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Call `event` at `time` (seconds), or now if that is past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def run(self, until: float = float("inf")) -> None:
        """Let events happen until none is left, or the next lies after `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
