"""A request whose next step may be planned before the last one's token is known."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from dualpace.core.history import TokenHistory
from dualpace.core.plan import PENDING, BatchRow, Tier
from dualpace.core.request import RequestState
from dualpace.kv.pages import BlockTable
from dualpace.policy.view import RowView


@dataclass(eq=False)
class PlannedRow:
    """A request, as it will be once all launched steps have ended.

    table: its pages, None while it has none; computed: leading positions that have KV; steps:
    launched steps that it takes part in, oldest first; pending: tokens that they will sample, which
    nobody knows yet.
    """

    state: RequestState
    tier: Tier = "gpu"
    table: BlockTable | None = None
    computed: int = 0
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
        state = self.state
        return RowView(
            state.id, state.arrival, self.num_tokens, self.computed, len(self.pages), self.tier
        )

    def batch_row(self, count: int, *, gated: bool = False) -> BatchRow:
        """Its part of a step that computes the next `count` positions."""
        state, end = self.state, self.computed + count
        samples = end == self.num_tokens
        if self.pending:
            tokens = [PENDING]
        elif samples and count == 1:
            tokens = [state.last_token]
        else:
            tokens = state.tokens_at(self.computed, end)
        return BatchRow(
            request_id=state.id,
            tokens=tokens,
            start=self.computed,
            pages=list(self.pages),
            tier=self.tier,
            sample=samples,
            params=state.params,
            banned_ids=state.banned_ids(self.pending),
            history=self.history.of(state) if samples else None,
            gated=gated,
        )

    def launched(self, step: int, part: BatchRow) -> None:
        """Step `step` has been launched with `part` of this row."""
        self.steps.append(step)
        self.computed = part.end
        self.pending += part.sample

    def forget_steps(self) -> None:
        """Whatever comes of the launched steps is not this row's any more."""
        self.steps.clear()
        self.pending = 0

    def rewind(self, part: BatchRow) -> None:
        """The step with `part` has failed: as if it, and all after it, had not been launched."""
        self.forget_steps()
        self.computed = part.start


by_arrival = operator.attrgetter("state.arrival")  # sort key
