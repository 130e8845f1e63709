"""The scheduler of gated steps: one engine that owns both tiers, as NEO does.

Host rows have no pace of their own: they decode in those steps for which the policy opens the
gate. Speaks with the frontend only. For the simulator; the engines have no gated step.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from dualpace.core.messages import CPU, FRONTEND, AnyMessage, Failed, Submit, token_event
from dualpace.core.plan import Batch, BatchRow, CopyJob, CopyKind, StepResult, Tier
from dualpace.core.request import RequestState
from dualpace.kv.ledger import TransferLedger
from dualpace.kv.pages import BlockTable, PagePool, pages_for
from dualpace.policy.view import GpuDecision, GpuView, Policy, RowView
from dualpace.scheduler.base import SchedulerBase

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class GatedRow:
    """A request. table: its pages in `tier`, None while it waits; target: pages in the other tier
    that it is being copied to."""

    state: RequestState
    tier: Tier = "gpu"
    table: BlockTable | None = None
    target: BlockTable | None = None
    computed: int = 0

    @property
    def decodes(self) -> bool:
        return self.table is not None and self.computed == self.state.num_tokens - 1

    def view(self) -> RowView:
        state = self.state
        pages = 0 if self.table is None else len(self.table)
        return RowView(state.id, state.arrival, state.num_tokens, self.computed, pages, self.tier)


class GatedScheduler(SchedulerBase):
    """One step at a time. pages, host_pages: of the two pools."""

    def __init__(
        self,
        policy: Policy,
        pages: int,
        host_pages: int,
        page_tokens: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        super().__init__(CPU, PagePool(pages))
        self.host_pool = PagePool(host_pages)
        self.policy = policy
        self.page_tokens = page_tokens
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.rows: dict[str, GatedRow] = {}
        self.queue: list[GatedRow] = []  # without pages, in arrival order
        self.ledger = TransferLedger()
        self._copies: list[CopyJob] = []
        self._tables: dict[int, tuple[BlockTable, BlockTable]] = {}
        self._held: dict[int, list[tuple[PagePool, BlockTable]]] = {}

    # -- drain -----------------------------------------------------------------------------------

    def handle(self, body: AnyMessage) -> None:
        if not isinstance(body, Submit):
            logger.error("a gated engine has no use for %s", type(body).__name__)
            return
        row = GatedRow(body.state)
        self.rows[row.state.id] = row
        bisect.insort(self.queue, row, key=_by_arrival)

    def on_end(self, request_id: str, last_epoch: int) -> None:
        row = self.rows.get(request_id)
        if row is not None and row.state.epoch <= last_epoch:
            self.end(row)

    def on_peer_end(self, request_id: str, last_epoch: int) -> None:
        """There is no peer."""

    def end(self, row: GatedRow) -> None:
        """Off the books; pages are free once no step or copy holds them."""
        del self.rows[row.state.id]
        if row.table is None:
            self.queue.remove(row)
        else:
            self._pool(row.tier).drop(row.table)

    # -- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Batch | None:
        self.report_stats(now, len(self.rows) - len(self.queue), len(self.queue))
        if not self.rows:
            return None
        decision = self.policy.plan_gpu(self.view(now))
        for request_id in decision.demote:
            self._swap(self.rows[request_id], "host")
        for request_id in decision.promote:
            self._swap(self.rows[request_id], "gpu")
        for request_id in decision.admit:
            self._admit(self.rows[request_id], "gpu")
        for request_id in decision.reserve:
            self._admit(self.rows[request_id], "host")
        return self.build(decision)

    def view(self, now: float) -> GpuView:
        """The books as the policy may see them; rows that are being copied are in none."""
        still = sorted(
            (row for row in self.rows.values() if row.table is not None and row.target is None),
            key=_by_arrival,
        )
        moving = [row for row in self.rows.values() if row.target is not None]
        return GpuView(
            now=now,
            page_tokens=self.page_tokens,
            pages_total=self.pool.total,
            pages_free=self.pool.free,
            max_rows=self.max_rows,
            max_tokens=self.max_tokens,
            decoding=tuple(row.view() for row in still if row.decodes and row.tier == "gpu"),
            prefilling=tuple(row.view() for row in still if not row.decodes),
            waiting=tuple(row.view() for row in self.queue[: self.max_rows]),
            host=tuple(row.view() for row in still if row.decodes and row.tier == "host"),
            pages_moving=sum(
                len(row.target) for row in moving if row.target and row.tier == "host"
            ),
            host_open=True,
            host_pages_total=self.host_pool.total,
            host_pages_free=self.host_pool.free,
        )

    def build(self, decision: GpuDecision) -> Batch | None:
        """GPU decodes, prompts and the first half's host rows; then the second half's."""
        prompts = dict(decision.prefill)  # a prompt of one token looks like a decode
        decodes = sorted(
            (
                row
                for row in self.rows.values()
                if row.decodes
                and row.tier == "gpu"
                and row.target is None
                and row.state.id not in prompts
            ),
            key=_by_arrival,
        )
        first = [(row, 1) for row in decodes]
        first += (
            (self.rows[request_id], count)
            for request_id, count in prompts.items()
            if self.rows[request_id].table is not None
        )
        first += ((self.rows[request_id], 1) for request_id in decision.gate[0])
        second = [(self.rows[request_id], 1) for request_id in decision.gate[1]]
        first = [part for part in first if self._has_room(*part)]
        second = [part for part in second if self._has_room(*part)]
        if not first and not second:
            return None
        self.steps += 1
        parts = [*first, *second]
        gated = any(decision.gate)
        batch = Batch(
            self.steps,
            tuple(_batch_row(row, count) for row, count in parts),
            second_half=len(first) if gated else None,
        )
        self.moves["gated"] += sum(row.tier == "host" and row.decodes for row, _ in parts)
        self._hold(batch.number, [row for row, _ in parts])
        for row, count in parts:
            row.computed += count
        return batch

    def _admit(self, row: GatedRow, tier: Tier) -> None:
        """Pages for a waiting row's tokens and the next one, if they are free by now."""
        table = self._pool(tier).take(pages_for(row.state.num_tokens + 1, self.page_tokens))
        if table is not None:
            self.queue.remove(row)
            row.table = table
            row.tier = tier

    def _swap(self, row: GatedRow, tier: Tier) -> None:
        """Start to copy a row to the other tier, if it has room by now."""
        assert row.table is not None
        count = pages_for(row.state.num_tokens, self.page_tokens)
        target = self._pool(tier).take(count)
        if target is None:
            return
        used = pages_for(row.computed, self.page_tokens)
        row.target = target
        kind: CopyKind = "store" if tier == "host" else "load"
        job = self.ledger.open(row.state.id, kind, row.table.pages[:used], target.pages[:used])
        self._pool(row.tier).hold(row.table)
        self._tables[job.number] = (row.table, target)
        self._copies.append(job)
        self.moves["demoted" if tier == "host" else "promoted"] += 1

    def _has_room(self, row: GatedRow, count: int) -> bool:
        assert row.table is not None
        missing = pages_for(row.computed + count, self.page_tokens) - len(row.table)
        return missing <= 0 or self._pool(row.tier).grow(row.table, missing)

    def _pool(self, tier: Tier) -> PagePool:
        return self.pool if tier == "gpu" else self.host_pool

    def _hold(self, number: int, rows: Iterable[GatedRow]) -> None:
        """As `hold_for_step`, for tables of two pools."""
        held = [(self._pool(row.tier), row.table) for row in rows if row.table is not None]
        for pool, table in held:
            pool.hold(table)
        self._held[number] = held

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult) -> None:
        self._let_go(batch)
        for index, (part, token) in enumerate(zip(batch.rows, result.tokens, strict=True)):
            row = self.rows.get(part.request_id)
            if row is None or token is None:
                continue
            row.state.append(token, result.logprobs.get(index))
            self.emit_token(token_event(row.state, len(row.state.output) - 1))
            if row.state.finish_reason is not None:
                self.end(row)

    def fail(self, batch: Batch, error: Exception) -> None:
        self._let_go(batch)
        for part in batch.rows:
            row = self.rows.get(part.request_id)
            if row is not None:
                self.send(FRONTEND, Failed(row.state.id, row.state.epoch, str(error)))
                self.end(row)

    def _let_go(self, batch: Batch) -> None:
        for pool, table in self._held.pop(batch.number):
            pool.drop(table)

    # -- copies ----------------------------------------------------------------------------------

    def take_copies(self) -> list[CopyJob]:
        jobs, self._copies = self._copies, []
        return jobs

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        """The row goes on in its new tier; if the copy failed, or it has ended, nowhere new."""
        self.ledger.close(job)
        source, target = self._tables.pop(job.number)
        new: Tier = "host" if job.kind == "store" else "gpu"
        old: Tier = "gpu" if new == "host" else "host"
        self._pool(old).drop(source)
        row = self.rows.get(job.request_id)
        if row is None or error is not None:
            self._pool(new).drop(target)
            if row is not None:
                row.target = None
            return
        self._pool(old).drop(source)
        row.tier, row.table, row.target = new, target, None

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        super().check_integrity()
        self.host_pool.check_integrity(idle=not self.rows)
        self.ledger.check_integrity()


def _by_arrival(row: GatedRow) -> int:
    return row.state.arrival


def _batch_row(row: GatedRow, count: int) -> BatchRow:
    state, end = row.state, row.computed + count
    assert row.table is not None
    return BatchRow(
        request_id=state.id,
        tokens=state.tokens[row.computed : end],
        start=row.computed,
        pages=list(row.table.pages),
        tier=row.tier,
        sample=end == state.num_tokens,
        params=state.params,
        banned_ids=state.banned_ids(),
    )
