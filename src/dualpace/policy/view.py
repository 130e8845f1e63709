"""What a policy sees and what it answers: ids, counts and the time, frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from dualpace.core.plan import Route, Tier


class RowView(msgspec.Struct, frozen=True):
    """One request.

    tokens: prompt and output tokens it has; computed: leading positions whose KV is written;
    pages: KV pages it holds in `tier`; last_step: the CPU iteration that it took part in last, or
    after which it came.
    """

    id: str
    arrival: int
    tokens: int
    computed: int = 0
    pages: int = 0
    tier: Tier = "gpu"
    last_step: int = 0

    @property
    def remaining(self) -> int:
        """Positions still to compute before its next token can be sampled."""
        return self.tokens - self.computed


def short_of_pages(rows: Iterable[RowView], page_tokens: int, lead: int = 1) -> int:
    """How many rows have pages that do not cover the next `lead` positions."""
    return sum(row.computed + lead > row.pages * page_tokens for row in rows)


class GpuView(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU engine between two steps; every tuple is in arrival order.

    decoding: rows with complete KV on the GPU; prefilling: rows with pages in either tier and
    positions left to compute; waiting: rows without pages (the first of them); host: the oldest
    requests of the CPU engine; moving: rows under promotion, whose GPU pages are reserved;
    demoting_pages: GPU pages that rows under demotion will give back; host_rows, host_context:
    requests that are the CPU engine's or on their way there, and their tokens; prefill_share: part
    of the GPU's last seconds that prompts have taken; overrun: seconds of a long one of the last
    steps with prompts over those predicted, at least 1; pages_moving: GPU pages of rows whose KV is
    being copied to the GPU, where one scheduler owns both tiers.
    """

    now: float
    page_tokens: int
    pages_total: int
    pages_free: int
    max_rows: int
    max_tokens: int
    prefill_share: float = 0.0
    overrun: float = 1.0
    decoding: tuple[RowView, ...] = ()
    prefilling: tuple[RowView, ...] = ()
    waiting: tuple[RowView, ...] = ()
    host: tuple[RowView, ...] = ()
    moving: int = 0
    demoting_pages: int = 0
    pages_moving: int = 0
    host_open: bool = False
    host_pages_total: int = 0
    host_pages_free: int = 0
    host_rows: int = 0
    host_context: int = 0


class GpuDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the GPU engine shall do now.

    admit: waiting rows that get GPU pages; reserve: waiting rows for which host pages are asked;
    promote: host rows to recall; demote: rows to move to the host; preempt: rows to recompute
    later; prefill: (row, number of positions) of the next step. Rows left in `decoding` decode.
    token_rate: tokens that one more second of the GPU would yield, which tells the CPU engine what
    its assists cost; prefill_share: the part of the next step's time that prompts will take;
    seconds: what that step is likely to take if prompts fill it, 0 if not, or where that is not
    known. gate: host rows that decode in the first and in the second half of this step, where one
    scheduler owns both tiers.
    """

    admit: tuple[str, ...] = ()
    reserve: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    demote: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()
    prefill: tuple[tuple[str, int], ...] = ()
    token_rate: float = 0.0
    prefill_share: float = 0.0
    seconds: float = 0.0
    gate: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


class CpuView(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU engine between two iterations; rows in arrival order.

    route: the last iteration's; token_rate, prefill_share: the GPU engine's, as it last told.
    """

    now: float
    page_tokens: int
    pages_free: int
    max_rows: int
    rows: tuple[RowView, ...] = ()
    route: Route = "local"
    token_rate: float = 0.0
    prefill_share: float = 0.0


class CpuDecision(msgspec.Struct, frozen=True, kw_only=True):
    """run: rows of the next iteration; send_back: rows to return for recompute, pages freed;
    route: who does the iteration's dense work."""

    run: tuple[str, ...] = ()
    send_back: tuple[str, ...] = ()
    route: Route = "local"


class Policy(Protocol):
    """Decides; owns nothing and remembers nothing."""

    uses_host: bool

    def plan_gpu(self, view: GpuView) -> GpuDecision: ...

    def plan_cpu(self, view: CpuView) -> CpuDecision: ...
