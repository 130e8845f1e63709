"""How busy prompts have kept the GPU of late, and how long they took, by the engine's own clock."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

SECONDS = 2.0  # after which what was before counts for a third: some iterations of the CPU engine
OVERRUN_SECONDS = 4.0  # of steps full of prompts, by prediction, that overrun is told from
QUICKER = 0.8  # the part of them that kept below it


class _Step(NamedTuple):
    prefill_share: float
    seconds: float


class StepLoad:
    """Averages, from what was predicted of each step and how long it ran.

    prefill_share: the part of the GPU's last seconds that prompts took. A step that is full of
    prompts takes half as long as an iteration of the CPU engine, and the next one may have none: a
    single step would tell it now the one and now the other. overrun: what a long one of the last
    steps full of prompts took over what was predicted of it, at least 1. Not the mean: how long one
    runs depends on what of the assists happens to fall into it, and whoever decodes meanwhile minds
    the long ones. Nor the longest: now and then something else holds a step up.

    Steps run one after the other, but are planned while the one before runs.
    """

    def __init__(self) -> None:
        self.prefill_share = 0.0
        self._under_way: dict[int, _Step] = {}  # by number; the first one runs
        self._started = self._since = -math.inf
        self._ended: list[int] = []  # since then
        self._overruns: deque[tuple[float, float]] = deque()  # each with the seconds predicted
        self._predicted = 0.0  # seconds of them in all

    @property
    def overrun(self) -> float:
        quicker = 0.0
        for overrun, predicted in sorted(self._overruns):
            quicker += predicted
            if quicker > QUICKER * self._predicted:
                return max(1.0, overrun)
        return 1.0

    def look(self, now: float) -> None:
        """Bring the averages up to date. To be called whenever a step has ended and before the next
        one is launched."""
        number, step = next(iter(self._under_way.items()), (0, _Step(0.0, 0.0)))
        kept = math.exp((self._since - now) / SECONDS)
        self.prefill_share = kept * self.prefill_share + (1.0 - kept) * step.prefill_share
        if self._ended == [number]:
            self._learn(step, now - self._started)
        if self._ended or not self._under_way:
            self._started = now
        for each in self._ended:
            del self._under_way[each]
        self._ended.clear()
        self._since = now

    def launched(self, number: int, prefill_share: float, seconds: float) -> None:
        """A step that is predicted to take so many seconds, of which prompts will take that share,
        just after `look`. Of no seconds: they do not fill it, or there is no telling."""
        self._under_way[number] = _Step(prefill_share, seconds)

    def ended(self, number: int) -> None:
        """What ran in its place until the next `look` was this step."""
        self._ended.append(number)

    def failed(self, number: int) -> None:
        """It ended without having done its work."""
        self._under_way[number] = self._under_way[number]._replace(seconds=0.0)
        self.ended(number)

    def _learn(self, step: _Step, took: float) -> None:
        if step.prefill_share and step.seconds:
            self._overruns.append((took / step.seconds, step.seconds))
            self._predicted += step.seconds
            while self._predicted - self._overruns[0][1] > OVERRUN_SECONDS:
                self._predicted -= self._overruns.popleft()[1]
