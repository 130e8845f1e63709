"""A request on the GPU engine's books, and the phases of its life there."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dualpace.core.plan import BatchRow, Tier
from dualpace.core.request import RequestState
from dualpace.kv.pages import BlockTable
from dualpace.policy.view import RowView


class Phase(enum.Enum):
    """Where a request stands, seen from the GPU engine.

    WAITING -> PREFILL -> DECODE                          on the GPU
    WAITING -> RESERVING -> PREFILL -> REMOTE             straight to the host
    DECODE -> DEMOTING -> STORING -> REMOTE               demotion
    REMOTE -> RECALLING -> LOADING -> DECODE              promotion
    any -> WAITING                                        recompute
    """

    WAITING = "waiting"  # no pages
    RESERVING = "reserving"  # host pages asked for
    PREFILL = "prefill"  # has pages in `tier`, some positions not computed
    DECODE = "decode"  # on the GPU, only its last token not computed
    DEMOTING = "demoting"  # on the GPU, host pages asked for
    STORING = "storing"  # its KV is being copied to the host
    REMOTE = "remote"  # the CPU engine's
    RECALLING = "recalling"  # the CPU engine's, asked back; GPU pages are reserved
    LOADING = "loading"  # its KV is being copied to the GPU


# Phases in which a row has host pages or has asked for some; beside them, a PREFILL into the host.
HOST_PHASES = (Phase.RESERVING, Phase.DEMOTING, Phase.STORING, Phase.REMOTE)


@dataclass(eq=False)
class Row:
    """One request. `computed` positions have KV; `step` is the launched step it takes part in.

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
    step: int | None = None

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

    def view(self) -> RowView:
        """As the policy sees it."""
        tokens = self.host_length if self.phase is Phase.REMOTE else self.state.num_tokens
        return RowView(self.id, self.arrival, tokens, self.computed, len(self.pages), self.tier)

    def batch_row(self, count: int) -> BatchRow:
        """Its part of a step that computes the next `count` positions."""
        end = self.computed + count
        decodes = self.phase is Phase.DECODE
        return BatchRow(
            request_id=self.id,
            tokens=[self.state.last_token] if decodes else self.state.tokens[self.computed : end],
            start=self.computed,
            pages=list(self.pages),
            tier=self.tier,
            sample=end == self.state.num_tokens,
            params=self.state.params,
            banned_ids=self.state.banned_ids,
        )


def by_arrival(row: Row) -> int:
    """Sort key."""
    return row.state.arrival
