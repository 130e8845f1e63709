"""What an engine runs in one step, and what comes back: the contract between loop and executor.

A `Batch` names rows, token ids and page ids, never tensors, so that the same batch can be run on
torch, by the C++ engine, or by the simulator's clock.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar, get_args

import msgspec

from dualpace.core.history import TokenCounts
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.sampling import DecodeParams

Tier = Literal["gpu", "host"]
# Who does the dense work of a CPU iteration: the host itself, or the GPU for one batch or for two
# halves in turn, of which the host attends to one while the GPU works on the other.
Route = Literal["local", "assist", "assist2"]
ROUTES: tuple[Route, ...] = get_args(Route)

# In place of the token that the row has sampled in the step launched just before, which nobody on
# the host knows yet.
PENDING = -1


class BatchRow(msgspec.Struct, frozen=True):
    """One request's part of a step.

    The step computes `tokens` at positions `start`, `start+1`, …, writes their KV into `pages` of
    `tier`, attends to positions 0 … `start+len(tokens)-1`, and, where `sample` is set, samples the
    token at position `start+len(tokens)`. `tokens` may be the one token `PENDING`. `history` is
    there where the parameters penalise; a pending token is not in it. For a `gated` row, whose one
    token's KV is the host's, the CPU engine attends within the GPU engine's step.
    """

    request_id: str
    tokens: list[int]
    start: int
    pages: list[int]
    tier: Tier
    sample: bool
    params: DecodeParams
    banned_ids: tuple[int, ...] = ()
    history: TokenCounts | None = None
    gated: bool = False

    @property
    def end(self) -> int:
        """First position after this step; also the position of the token it samples."""
        return self.start + len(self.tokens)

    @property
    def is_special(self) -> bool:
        """True for a row whose draw takes more than temperature and noise."""
        params = self.params
        return bool(
            self.banned_ids
            or params.top_k > 0
            or params.top_p < 1.0
            or params.min_p > 0.0
            or params.logit_bias
            or params.penalizes
            or params.logprobs is not None
        )


class Batch(msgspec.Struct, frozen=True):
    """One step of one engine. `number` counts the engine's steps from 1; `route` is a CPU
    iteration's; from row `second_half` on, the rows of a gated step take turns with those before.
    For the CPU engine a batch with `second_half` is its part of a gated step, of that number.
    """

    number: int
    rows: tuple[BatchRow, ...]
    route: Route = "local"
    second_half: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def halves(self) -> tuple[tuple[BatchRow, ...], ...]:
        """Rows of a gated step that go through a layer together, in one or two parts."""
        split = len(self.rows) if self.second_half is None else self.second_half
        return tuple(part for part in (self.rows[:split], self.rows[split:]) if part)


class StepResult(msgspec.Struct, frozen=True):
    """What a step has made: row by row the sampled token id, or None for a row that samples none.

    `logprobs` are there for the sampled rows that asked for them, by the row's index.
    """

    tokens: list[int | None]
    logprobs: dict[int, TokenLogprobs] = {}


CopyKind = Literal["load", "store", "land"]


class CopyJob(msgspec.Struct, frozen=True):
    """Move one request's pages between the tiers: page `source[i]` to page `target[i]`.

    "load" brings host pages to the GPU (promotion), "store" takes GPU pages to the host (demotion).
    "land" names no pages: it ends when all that steps launched before have computed for the
    request's host pages has arrived there.
    """

    number: int
    request_id: str
    kind: CopyKind
    source: list[int]
    target: list[int]


Outcome = TypeVar("Outcome", covariant=True)


class Ticket(Protocol[Outcome]):
    """A launched step or copy."""

    def done(self) -> bool:
        """True once `result` returns without waiting."""
        ...

    def result(self) -> Outcome:
        """The outcome. Raises what went wrong on the device, if anything did."""
        ...


class Executor(Protocol):
    """Runs batches and copies of one engine, in the order of launch, and never blocks the loop.

    Whoever builds an executor gives it a `wake` callback, which it calls from any thread once a
    ticket is done.
    """

    def launch(self, batch: Batch) -> Ticket[StepResult]:
        """Start a step."""
        ...

    def copy(self, job: CopyJob) -> Ticket[None]:
        """Start a copy between the tiers."""
        ...

    def close(self) -> None:
        """Finish what runs and let go of threads and memory."""
        ...
