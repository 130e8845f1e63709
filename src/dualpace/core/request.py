"""One request as the engines see it: token ids, decoding rules, whose it is.

Knows nothing of text, pages, tensors or messages.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.sampling import DecodeParams

FinishReason = Literal["stop", "length"]


class RequestState(msgspec.Struct):
    """Everything that travels with a request when it changes its engine, KV pages apart.

    `arrival` is its place in the queue for as long as it lives; `epoch` grows by one with every
    change of owner, and a result that carries an older epoch is dropped. `logprobs` has one entry
    for each of `output` where the request asked for them, else none.
    """

    id: str
    arrival: int
    epoch: int
    prompt: list[int]
    output: list[int]
    params: DecodeParams
    logprobs: list[TokenLogprobs] = []

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """One more output token."""
        self.output.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt) + len(self.output)

    def tokens_at(self, start: int, end: int) -> list[int]:
        """Tokens at positions `start` … `end - 1`, known ones; a long prompt is not copied for a
        part of it."""
        first = len(self.prompt)
        if end <= first:
            return self.prompt[start:end]
        return self.prompt[start:] + self.output[max(start - first, 0) : end - first]

    @property
    def last_token(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    def banned_ids(self, pending: int = 0) -> tuple[int, ...]:
        """Ids that may not be sampled after `pending` more tokens: those that would end it before
        `min_tokens`."""
        return self.params.stop_ids if len(self.output) + pending < self.params.min_tokens else ()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ends with the tokens it has, or None while it goes on."""
        if not self.output:
            return None
        if self.output[-1] in self.params.stop_ids and len(self.output) > self.params.min_tokens:
            return "stop"
        if len(self.output) >= self.params.max_tokens:
            return "length"
        return None
