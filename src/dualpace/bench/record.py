"""What the client saw of one request: plain data between client, metrics and plots.

All times are seconds after the start of the replay, on the client's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dualpace.bench.load import LoadRequest

UNREPORTED = "unreported"  # for "engine" where tokens are counted and their chunk names none


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One streamed event that carried tokens. `engine` is None where the server names none.

    There is one for every token of a replay, and the garbage collector would look at all of them
    while it goes on.
    """

    time_s: float
    tokens: int
    engine: str | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request as sent and as answered.

    `sent_s` is when the request was really written; it lies after `request.arrival_s` where the
    client was late or a concurrency limit held it back. `estimated` is set where the server told
    only the total of tokens, and the tokens of single chunks are a guess. `error` is None for a
    request that did not fail. `cut` is set where the replay was ended before the answer was.
    `index` is its place in the load.
    """

    request: LoadRequest
    sent_s: float
    end_s: float
    prompt_tokens: int
    chunks: list[Chunk] = field(default_factory=list)
    finish_reason: str | None = None
    estimated: bool = False
    error: str | None = None
    cut: bool = False
    index: int = 0

    @property
    def ok(self) -> bool:
        """True for a request that was answered to its end."""
        return self.error is None and not self.cut

    @property
    def output_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the real send time."""
        return self.chunks[0].time_s - self.sent_s if self.chunks else None

    @property
    def latency_s(self) -> float | None:
        """Time to the last token, from the real send time."""
        return self.chunks[-1].time_s - self.sent_s if self.chunks else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first one; None if there is no second.

        Tokens that came together with the first one took no visible time and are left out, or a
        server that answers in one chunk would score 0.
        """
        later = self.output_tokens - self.chunks[0].tokens if self.chunks else 0
        if later < 1:
            return None
        return (self.chunks[-1].time_s - self.chunks[0].time_s) / later
