"""A request on the GPU engine's books, and the phases of its life there."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dualpace.core.history import TokenHistory
from dualpace.core.plan import PENDING, BatchRow, Tier
from dualpace.core.request import RequestState
from dualpace.kv.pages import BlockTable
from dualpace.policy.view import RowView


class Phase(enum.Enum):
    """Where a request stands, seen from the GPU engine.

    WAITING -> PREFILL -> DECODE                          on the GPU
    WAITING -> RESERVING -> PREFILL -> LANDING -> REMOTE  straight to the host
    DECODE -> DEMOTING -> STORING -> REMOTE               demotion
    REMOTE -> RECALLING -> LOADING -> DECODE              promotion
    any -> WAITING                                        recompute
    """

    WAITING = "waiting"  # no pages
    RESERVING = "reserving"  # host pages asked for
    PREFILL = "prefill"  # has pages in `tier`, some positions not computed
    DECODE = "decode"  # on the GPU, only its last token not computed
    LANDING = "landing"  # the last of its prompt is being computed, or on its way to host pages
    DEMOTING = "demoting"  # on the GPU, host pages asked for
    STORING = "storing"  # its KV is being copied to the host
    REMOTE = "remote"  # the CPU engine's
    RECALLING = "recalling"  # the CPU engine's, asked back; GPU pages are reserved
    LOADING = "loading"  # its KV is being copied to the GPU


# Phases in which a row has host pages or has asked for some; beside them, a PREFILL into the host.
HOST_PHASES = (Phase.RESERVING, Phase.LANDING, Phase.DEMOTING, Phase.STORING, Phase.REMOTE)


@dataclass(eq=False)
class Row:
    """One request, as it will be once all launched steps have ended.

    computed: leading positions that have KV; steps: launched steps that it takes part in, oldest
    first; pending: tokens that they will sample, which nobody knows yet;
    table: its GPU pages, in every phase in which it has some or is to get its KV there;
    host_pages: granted or released pages of the CPU engine's pool; host_length: its tokens when
    the CPU engine last told; host_tokens: output tokens it had when the CPU engine, of which it
    has come back, took it over, else None.
    """

    state: RequestState
    phase: Phase = Phase.WAITING
    tier: Tier = "gpu"
    computed: int = 0
    table: BlockTable | None = None
    host_pages: list[int] = field(default_factory=list)
    host_length: int = 0
    host_knows: bool = False
    host_tokens: int | None = None
    steps: list[int] = field(default_factory=list)
    pending: int = 0
    history: TokenHistory = field(default_factory=TokenHistory)

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def arrival(self) -> int:
        return self.state.arrival

    @property
    def pages(self) -> list[int]:
        """Its pages in its tier."""
        if self.tier == "host":
            return self.host_pages
        return self.table.pages if self.table is not None else []

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, pending ones included."""
        return self.state.num_tokens + self.pending

    @property
    def at_length(self) -> bool:
        """True if its pending tokens are the last that it may have."""
        return len(self.state.output) + self.pending >= self.state.params.max_tokens

    def view(self) -> RowView:
        """As the policy sees it."""
        tokens = self.host_length if self.phase is Phase.REMOTE else self.num_tokens
        return RowView(self.id, self.arrival, tokens, self.computed, len(self.pages), self.tier)

    def batch_row(self, count: int) -> BatchRow:
        """Its part of a step that computes the next `count` positions."""
        end = self.computed + count
        samples = end == self.num_tokens
        if self.pending:
            tokens = [PENDING]
        elif self.phase is Phase.DECODE:
            tokens = [self.state.last_token]
        else:
            tokens = self.state.tokens[self.computed : end]
        return BatchRow(
            request_id=self.id,
            tokens=tokens,
            start=self.computed,
            pages=list(self.pages),
            tier=self.tier,
            sample=samples,
            params=self.state.params,
            banned_ids=self.state.banned_ids(self.pending),
            history=self.history.of(self.state) if samples else None,
        )

    def launched(self, step: int, part: BatchRow) -> None:
        """Step `step` has been launched with `part` of this row."""
        self.steps.append(step)
        self.computed = part.end
        if part.sample:
            self.pending += 1
            if self.phase is Phase.PREFILL:
                self.phase = Phase.LANDING if self.tier == "host" else Phase.DECODE

    def stay(self) -> None:
        """It was to move to the host, and goes on here: what pages it was granted are not its."""
        self.phase = Phase.DECODE
        self.host_pages = []

    def forget_steps(self) -> None:
        """Whatever comes of the launched steps is not this row's any more."""
        self.steps.clear()
        self.pending = 0

    def rewind(self, part: BatchRow) -> None:
        """The step with `part` has failed: as if it, and all after it, had not been launched."""
        self.forget_steps()
        self.computed = part.start
        in_prompt = self.computed < self.state.num_tokens - 1
        if self.phase is Phase.LANDING or (self.phase is Phase.DECODE and in_prompt):
            self.phase = Phase.PREFILL


def by_arrival(row: Row) -> int:
    """Sort key."""
    return row.state.arrival
