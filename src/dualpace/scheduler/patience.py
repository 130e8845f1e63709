"""How long things have been as they are: what a scheduler asks before it takes silence for loss.

Knows neither clock nor scheduler: it is told the time and the states, as often as one likes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

LOOK_INTERVAL = 1.0  # seconds between two looks at everything that waits
MAX_GAP = 2.0  # seconds that count at most between two calls: meanwhile nobody could act


class Patience:
    """Names the things whose state has not changed for `seconds`, then times those afresh."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: dict[str, tuple[Hashable, float]] = {}
        self._called: float | None = None
        self._time = 0.0

    def overdue(
        self, now: float, states: Mapping[str, Hashable], most: int | None = None
    ) -> list[str]:
        """Those that are late among all there are now; beyond `most`, the others next time."""
        if self._called is not None:
            self._time += min(now - self._called, MAX_GAP)
        self._called = now
        late: list[str] = []
        since: dict[str, tuple[Hashable, float]] = {}
        for key, state in states.items():
            before, start = self._since.get(key, (state, self._time))
            if before != state:
                start = self._time
            elif self._time - start >= self.seconds and (most is None or len(late) < most):
                late.append(key)
                start = self._time
            since[key] = (state, start)
        self._since = since
        return late
