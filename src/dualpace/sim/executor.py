"""The third executor: it takes virtual time instead of computing.

Its model is a hash: the next token is a function of all earlier tokens, *read back from the
simulated KV pages*. So a page that was freed too early, overwritten or moved to the wrong place
changes the output, and a simulation checks page ownership as well as it measures. Reading a whole
context for every token is slow: a run that only measures goes without the pages' contents.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.plan import PENDING, Batch, BatchRow, CopyJob, StepResult, Tier
from dualpace.sim.clock import VirtualClock

Outcome = TypeVar("Outcome")
VOCABULARY = 50_000
UNCHECKED_TOKEN = 0  # every token of a simulation without KV contents


class SimulatedMemory:
    """Token ids in KV pages of both tiers; what was never written reads as -1.

    What a GPU step computes for host pages is in transit, seen by the request's later steps only,
    until it has landed.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pages: dict[tuple[Tier, int], list[int]] = {}
        self._transit: dict[str, dict[tuple[int, int], int]] = {}

    def page(self, tier: Tier, page: int) -> list[int]:
        return self._pages.setdefault((tier, page), [-1] * self.page_tokens)

    def write(self, row: BatchRow, tokens: list[int], *, transit: bool) -> None:
        """The step's KV goes to the row's pages, or on its way there."""
        for position, token in enumerate(tokens, row.start):
            page, slot = divmod(position, self.page_tokens)
            if transit:
                places = self._transit.setdefault(row.request_id, {})
                places[row.pages[page], slot] = token
            else:
                self.page(row.tier, row.pages[page])[slot] = token

    def read(self, row: BatchRow, *, transit: bool) -> list[int]:
        """KV of positions 0 … end-1, as attention would read it."""
        under_way = self._transit.get(row.request_id, {}) if transit else {}
        tokens: list[int] = []
        for page in row.pages:
            slots = self.page(row.tier, page)
            tokens += [under_way.get((page, slot), token) for slot, token in enumerate(slots)]
        return tokens[: row.end]

    def in_transit(self, request_id: str) -> dict[tuple[int, int], int]:
        """What is on its way to the host for the request: tokens by page and slot."""
        return dict(self._transit.get(request_id, {}))

    def copy(self, job: CopyJob, landing: Mapping[tuple[int, int], int]) -> None:
        """Carry out a load or a store, or let `landing` land, which was in transit at its start."""
        under_way = self._transit.get(job.request_id, {})
        for (page, slot), token in landing.items():
            self.page("host", page)[slot] = token
            under_way.pop((page, slot), None)
        if not under_way:
            self._transit.pop(job.request_id, None)
        source: Tier = "host" if job.kind == "load" else "gpu"
        target: Tier = "gpu" if job.kind == "load" else "host"
        for old, new in zip(job.source, job.target, strict=True):
            self.page(target, new)[:] = self.page(source, old)


def next_token(tokens: list[int]) -> int:
    """The simulated model: a checksum of everything before."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)) % (
        VOCABULARY
    )


def simulated_logprobs(token: int) -> TokenLogprobs:
    """A token's logprobs tell which token they belong to."""
    return TokenLogprobs(-float(token), token + 1, [token], [-float(token)])


class SimulatedTicket(Generic[Outcome]):
    """Done when its time has come; what it does happens then."""

    def __init__(self) -> None:
        self._outcome: list[Outcome | Exception] = []

    def finish(self, outcome: Outcome | Exception) -> None:
        self._outcome.append(outcome)

    def done(self) -> bool:
        return bool(self._outcome)

    def result(self) -> Outcome:
        outcome = self._outcome[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class SimulatedExecutor:
    """Implements `core.plan.Executor`.

    `step_time(batch)` and `copy_time(job)` give seconds; `wake` is called at each completion;
    `failure(batch)` may give an error that the step ends with instead of computing anything; with
    `lands`, what is computed for host pages arrives there by a copy of the kind "land" only.
    Steps run one after the other, copies beside them. Without `memory` every token is the same.
    """

    def __init__(
        self,
        clock: VirtualClock,
        memory: SimulatedMemory | None,
        step_time: Callable[[Batch], float],
        copy_time: Callable[[CopyJob], float],
        wake: Callable[[], None],
        failure: Callable[[Batch], Exception | None] = lambda batch: None,
        *,
        lands: bool = False,
    ) -> None:
        self._clock = clock
        self._lands = lands
        self._memory = memory
        self._step_time = step_time
        self._copy_time = copy_time
        self._wake = wake
        self._failure = failure
        self._sampled: dict[str, int] = {}  # by the step that ended last
        self._free_at = 0.0
        self._closed = False

    def launch(self, batch: Batch) -> SimulatedTicket[StepResult]:
        ticket: SimulatedTicket[StepResult] = SimulatedTicket()
        self._free_at = max(self._free_at, self._clock.now) + self._step_time(batch)

        def complete() -> None:
            if self._closed:
                return
            ticket.finish(self._failure(batch) or self._compute(batch))
            self._wake()

        self._clock.at(self._free_at, complete)
        return ticket

    def copy(self, job: CopyJob) -> SimulatedTicket[None]:
        ticket: SimulatedTicket[None] = SimulatedTicket()
        landing = {}
        if self._memory is not None and job.kind == "land":
            landing = self._memory.in_transit(job.request_id)

        def complete() -> None:
            if self._closed:
                return
            if self._memory is not None:
                self._memory.copy(job, landing)
            ticket.finish(None)
            self._wake()

        self._clock.at(self._clock.now + self._copy_time(job), complete)
        return ticket

    def close(self) -> None:
        """As when its process is killed: what is under way never completes."""
        self._closed = True

    def _compute(self, batch: Batch) -> StepResult:
        tokens = self._tokens(batch)
        logprobs = {
            index: simulated_logprobs(token)
            for index, (row, token) in enumerate(zip(batch.rows, tokens, strict=True))
            if token is not None and row.params.logprobs is not None
        }
        return StepResult(tokens, logprobs)

    def _tokens(self, batch: Batch) -> list[int | None]:
        if self._memory is None:
            return [UNCHECKED_TOKEN if row.sample else None for row in batch.rows]
        for row in batch.rows:
            # The step before may have failed, and this one be garbage that nobody will look at.
            last = self._sampled.get(row.request_id, UNCHECKED_TOKEN)
            known = [last] if row.tokens == [PENDING] else row.tokens
            self._memory.write(row, known, transit=self._in_transit(row))
        tokens = [
            next_token(self._memory.read(row, transit=self._in_transit(row)))
            if row.sample
            else None
            for row in batch.rows
        ]
        self._sampled = {
            row.request_id: token
            for row, token in zip(batch.rows, tokens, strict=True)
            if token is not None
        }
        return tokens

    def _in_transit(self, row: BatchRow) -> bool:
        return self._lands and row.tier == "host" and not row.gated
