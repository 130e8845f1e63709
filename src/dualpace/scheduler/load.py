"""How busy prompts have kept the GPU: what the CPU engine's next iterations will run beside."""

from __future__ import annotations

import math

SECONDS = 2.0  # after which what was before counts for a third: some iterations of the CPU engine


class PrefillShare:
    """The part of the GPU's time that prompts take, averaged over the last seconds.

    A step is either half an iteration's time full of prompts or has none, so that a single one
    would tell the CPU engine now the one and now the other.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._since = -math.inf
        self._step = 0.0

    def step(self, now: float, share: float) -> None:
        """A step begins of whose time prompts take `share`; so has the one before it ended."""
        kept = math.exp((self._since - now) / SECONDS)
        self.value = kept * self.value + (1.0 - kept) * self._step
        self._since, self._step = now, share
