"""The CPU engine as it attends for host rows in gated steps: is there one to count on?"""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds for which the gate stays shut after a failure


class Attendant:
    """Learns of the CPU engine's life, death and failures.

    A failure may be a death that is not known yet: the gate stays shut for a while, longer each
    time in a row.
    """

    def __init__(self) -> None:
        self._up = False
        self._failures = 0  # in a row
        self._shut_at: float | None = None

    def came_up(self) -> None:
        self._up = True
        self.succeeded()

    def went_down(self) -> None:
        self._up = False

    def succeeded(self) -> None:
        """It has done its part of a step."""
        self._failures = 0

    def failed(self) -> None:
        """It has not."""
        self._failures += 1
        self._shut_at = None

    def ready(self, now: float) -> bool:
        """True if a step may count on it."""
        if not self._up or not self._failures:
            return self._up
        if self._shut_at is None:
            self._shut_at = now
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE)
        return now - self._shut_at >= pause
