"""The tokens of a request as penalties look at them: which ids it has, and how often it made each.

Kept by whoever owns the request, one addition a token, so that no step has to count a long context
again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from dualpace.core.request import RequestState


class TokenCounts(NamedTuple):
    """Distinct ids of prompt and output, int32, in no order, and the outputs' count of each."""

    ids: array[int]
    counts: array[int]

    def with_output(self, token_id: int) -> TokenCounts:
        """The counts with one more output."""
        ids, counts = self.ids[:], self.counts[:]
        if token_id in ids:
            counts[ids.index(token_id)] += 1
        else:
            ids.append(token_id)
            counts.append(1)
        return TokenCounts(ids, counts)


class TokenHistory:
    """The counts of one request, which grow with its output."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # place of each id in the two below
        self._ids = array("i")
        self._counts = array("i")
        self._seen = 0  # outputs that are counted

    def of(self, state: RequestState) -> TokenCounts | None:
        """The counts of what `state` has now, if its parameters penalise; always of one request."""
        return self.counts(state.prompt, state.output) if state.params.penalizes else None

    def counts(self, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        """A copy of the counts. From call to call the prompt is the same and the output grows."""
        if not self._slots:
            self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt))}
            self._ids.extend(self._slots)
            self._counts.extend([0] * len(self._slots))
        for token_id in output[self._seen :]:
            slot = self._slots.setdefault(token_id, len(self._ids))
            if slot == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[slot] += 1
        self._seen = len(output)
        return TokenCounts(self._ids[:], self._counts[:])
