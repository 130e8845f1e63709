"""How busy prompts have kept the GPU of late, and how long they took, by the engine's own clock."""

from __future__ import annotations

import math
from typing import NamedTuple

SECONDS = 2.0  # after which what was before counts for a third: some iterations of the CPU engine
NO_STEP = -1
MOST_OVERRUN = 2.0  # or half: steps that are held up by something else say nothing about the next


class _Step(NamedTuple):
    prefill_share: float
    seconds: float


class StepLoad:
    """Averages over the last seconds, from what was predicted of each step and how long it ran.

    prefill_share: the part of the GPU's time that prompts take. A step is either half an
    iteration's time full of prompts or has none, so that a single one would tell the CPU engine now
    the one and now the other. overrun: seconds of steps with prompts over those that were
    predicted; 1 as long as nothing is known.

    Steps run one after the other, but are planned while the one before runs.
    """

    def __init__(self) -> None:
        self.prefill_share = 0.0
        self._under_way: dict[int, _Step] = {}  # by number, in the order of the steps
        self._since = -math.inf
        self._running = NO_STEP  # since then
        self._ran = 0.0  # seconds of it before
        self._ended: list[int] = []  # since then
        self._took = self._predicted = 0.0  # seconds of steps with prompts

    @property
    def overrun(self) -> float:
        if not self._predicted:
            return 1.0
        return min(max(self._took / self._predicted, 1.0 / MOST_OVERRUN), MOST_OVERRUN)

    def look(self, now: float) -> None:
        """Bring the averages up to date. To be called whenever a step has ended and before the next
        one is launched."""
        running = self._under_way.get(self._running)
        kept = math.exp((self._since - now) / SECONDS)
        share = 0.0 if running is None else running.prefill_share
        self.prefill_share = kept * self.prefill_share + (1.0 - kept) * share
        self._ran += now - self._since
        if running is not None and self._ended == [self._running]:
            self._learn(running, self._ran)
        for number in self._ended:
            del self._under_way[number]
        self._ended.clear()
        self._since = now
        self._start_next()

    def launched(self, number: int, prefill_share: float, seconds: float) -> None:
        """A step that is predicted to take so many seconds, of which prompts will take that share,
        just after `look`. Of no seconds: there is no telling."""
        self._under_way[number] = _Step(prefill_share, seconds)
        self._start_next()

    def ended(self, number: int) -> None:
        """What ran in its place until the next `look` was this step."""
        self._ended.append(number)

    def _learn(self, step: _Step, took: float) -> None:
        if step.prefill_share and step.seconds:
            kept = math.exp(-took / SECONDS)
            self._took = kept * self._took + took
            self._predicted = kept * self._predicted + step.seconds

    def _start_next(self) -> None:
        first = next(iter(self._under_way), NO_STEP)
        if first != self._running:
            self._running, self._ran = first, 0.0
