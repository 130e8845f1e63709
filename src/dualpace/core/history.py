"""The tokens of a request as penalties look at them: which ids it has, and how often it made each.

Kept by whoever owns the request, one addition a token, so that no step has to count a long context
again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class TokenCounts(NamedTuple):
    """Distinct ids of prompt and output, int32, in no order, and the outputs' count of each."""

    ids: array[int]
    counts: array[int]


class TokenHistory:
    """Counts that grow with a request's output. `prompt`, and later outputs, are ids below 2^31."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt))}
        self._ids = array("i", self._slots)
        self._counts = array("i", bytes(4 * len(self._slots)))
        self._seen = 0  # outputs that are counted

    def counts(self, output: Sequence[int]) -> TokenCounts:
        """A copy of the counts after `output`, which only ever grows from call to call."""
        for token_id in output[self._seen :]:
            slot = self._slots.setdefault(token_id, len(self._ids))
            if slot == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[slot] += 1
        self._seen = len(output)
        return TokenCounts(self._ids[:], self._counts[:])
