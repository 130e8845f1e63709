"""A request on the books of the scheduler that owns both tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dualpace.core.history import TokenHistory
from dualpace.core.plan import BatchRow, Tier
from dualpace.core.request import RequestState
from dualpace.kv.pages import BlockTable
from dualpace.policy.view import RowView


@dataclass(eq=False)
class TierRow:
    """A request. table: its pages in `tier`, None while it waits; target: pages in the other tier
    that it is being copied to; step: the launched one that it takes part in; landing: copies under
    way that bring what steps have computed for its host pages there."""

    state: RequestState
    tier: Tier = "gpu"
    table: BlockTable | None = None
    target: BlockTable | None = None
    computed: int = 0
    step: int | None = None
    landing: int = 0
    history: TokenHistory = field(default_factory=TokenHistory)

    @property
    def decodes(self) -> bool:
        return self.table is not None and self.computed == self.state.num_tokens - 1

    @property
    def still(self) -> bool:
        """True if a step or copy may begin with all of its KV that there is."""
        return self.target is None and not (self.landing and self.decodes)

    def view(self) -> RowView:
        state = self.state
        pages = 0 if self.table is None else len(self.table)
        return RowView(state.id, state.arrival, state.num_tokens, self.computed, pages, self.tier)

    def batch_row(self, count: int, *, gated: bool) -> BatchRow:
        """Its part of a step that computes the next `count` positions."""
        state, end = self.state, self.computed + count
        assert self.table is not None
        samples = end == state.num_tokens
        return BatchRow(
            request_id=state.id,
            tokens=state.tokens[self.computed : end],
            start=self.computed,
            pages=list(self.table.pages),
            tier=self.tier,
            sample=samples,
            params=state.params,
            banned_ids=state.banned_ids(),
            history=self.history.of(state) if samples else None,
            gated=gated,
        )


def by_arrival(row: TierRow) -> int:
    """Sort key."""
    return row.state.arrival
