"""How busy prompts have kept the GPU: what the CPU engine's next iterations will run beside."""

from __future__ import annotations

import math

SECONDS = 2.0  # after which what was before counts for a third: some iterations of the CPU engine


class PrefillShare:
    """The part of the GPU's time that prompts take, averaged over the last seconds.

    A step is either half an iteration's time full of prompts or has none, so that a single one
    would tell the CPU engine now the one and now the other. Steps run one after the other, but are
    planned while the one before runs.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._since = -math.inf
        self._running = 0.0  # share of the step that has run since then
        self._under_way: dict[int, float] = {}  # shares by number, in the order of the steps

    def look(self, now: float) -> None:
        """Bring `value` up to date. To be called whenever a step has ended and before the next one
        is launched."""
        kept = math.exp((self._since - now) / SECONDS)
        self.value = kept * self.value + (1.0 - kept) * self._running
        self._since = now
        self._running = self._first()

    def launched(self, number: int, share: float) -> None:
        """A step of whose time prompts will take `share`, just after `look`."""
        self._under_way[number] = share
        self._running = self._first()

    def ended(self, number: int) -> None:
        """What ran in its place until the next `look` was this step."""
        del self._under_way[number]

    def _first(self) -> float:
        return next(iter(self._under_way.values()), 0.0)
