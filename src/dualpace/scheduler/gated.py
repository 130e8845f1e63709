"""The scheduler of gated steps: one engine that owns both tiers, as NEO does.

Host rows have no pace of their own: they decode in those steps for which the policy opens the
gate. The CPU engine is told of each such step (`gated_cpu` is its scheduler) and owns nothing:
should it die in one, all KV is still there, and the rows are run again.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence

from dualpace.core.errors import AssistError, StepTooLargeError
from dualpace.core.messages import (
    CPU,
    FRONTEND,
    AnyMessage,
    Failed,
    GatedRow,
    GatedRun,
    HostGone,
    PeerDown,
    PeerDrained,
    PeerUp,
    Submit,
    token_event,
)
from dualpace.core.plan import Batch, BatchRow, CopyJob, CopyKind, StepResult, Tier
from dualpace.kv.ledger import TransferLedger
from dualpace.kv.pages import BlockTable, PagePool, pages_for
from dualpace.policy.view import GpuDecision, GpuView, Policy
from dualpace.scheduler.attendant import Attendant
from dualpace.scheduler.base import SchedulerBase
from dualpace.scheduler.gated_rows import TierRow, by_arrival

logger = logging.getLogger(__name__)
NO_LIMIT = 2**62


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
        *,
        attendant: Attendant | None = None,
        usable_host_pages: Callable[[], int] = lambda: NO_LIMIT,
    ) -> None:
        """attendant: the CPU engine, None where the executor attends for host rows by itself and
        takes whole prompts, as the simulator's does; usable_host_pages: how many of the host's
        pages, from 0 on, can be copied by now."""
        super().__init__(CPU, PagePool(pages))
        self.host_pages = host_pages
        self.host_pool = PagePool(min(host_pages, usable_host_pages()))
        self.usable_host_pages = usable_host_pages
        self.policy = policy
        self.attendant = attendant
        self.page_tokens = page_tokens
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        # Positions that a step may have: fewer for a while after one that was too large.
        self.step_tokens = self.most_tokens = NO_LIMIT if attendant is None else max_tokens
        self.rows: dict[str, TierRow] = {}
        self.queue: list[TierRow] = []  # without pages, in arrival order
        self.ledger = TransferLedger()
        self._draining: int | None = None  # generation of a dead CPU engine
        self._copies: list[CopyJob] = []
        self._tables: dict[int, tuple[BlockTable, BlockTable]] = {}
        self._landing: dict[int, tuple[TierRow | None, BlockTable]] = {}
        self._held: dict[int, list[tuple[PagePool, BlockTable]]] = {}

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return self.pool, self.host_pool

    # -- drain -----------------------------------------------------------------------------------

    def handle(self, body: AnyMessage) -> None:
        match body:
            case Submit():
                row = TierRow(body.state)
                self.rows[row.state.id] = row
                bisect.insort(self.queue, row, key=by_arrival)
            case PeerUp() if self.attendant is not None:
                self.attendant.came_up()
            case PeerDown() if self.attendant is not None:
                self.attendant.went_down()
                self._draining = body.generation
                self._report_drained()
            case HostGone():
                pass  # the gate is shut already, and all rows can come back to the GPU
            case _:
                logger.error("a gated engine has no use for %s", type(body).__name__)

    def on_end(self, request_id: str, last_epoch: int) -> None:
        row = self.rows.get(request_id)
        if row is not None and row.state.epoch <= last_epoch:
            self.end(row)

    def on_peer_end(self, request_id: str, last_epoch: int) -> None:
        """The CPU engine knows no requests."""

    def end(self, row: TierRow) -> None:
        """Off the books; pages are free once no step or copy holds them."""
        del self.rows[row.state.id]
        if row.table is None:
            self.queue.remove(row)
        else:
            self._pool(row.tier).drop(row.table)

    def requeue(self, row: TierRow) -> None:
        """Back to the waiting queue, with nothing computed."""
        assert row.table is not None
        self._pool(row.tier).drop(row.table)
        row.table = row.step = None
        row.computed = 0
        bisect.insort(self.queue, row, key=by_arrival)
        self.moves["preempted"] += 1

    # -- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Batch | None:
        self.report_stats(now, len(self.rows) - len(self.queue), len(self.queue))
        if self.host_pool.total < self.host_pages:
            self.host_pool.extend(min(self.host_pages, self.usable_host_pages()))
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
            (row for row in self.rows.values() if row.table is not None and row.still),
            key=by_arrival,
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
            host_open=self.attendant is None or self.attendant.ready(now),
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
                if row.decodes and row.tier == "gpu" and row.still and row.state.id not in prompts
            ),
            key=by_arrival,
        )[: self.step_tokens]
        left = self.step_tokens - len(decodes)
        gate = []
        for request_ids in decision.gate:
            # A slot of the mailbox takes max_rows.
            gate.append([self.rows[each] for each in request_ids[: min(self.max_rows, left)]])
            left -= len(gate[-1])
        chunks = self._chunks(decision.prefill, left)
        first = [(row, 1) for row in decodes] + chunks + [(row, 1) for row in gate[0]]
        second = [(row, 1) for row in gate[1]]
        first = [part for part in first if self._has_room(*part)]
        second = [part for part in second if self._has_room(*part)]
        if not first and not second:
            return None
        self.steps += 1
        gated = {id(row) for half in gate for row in half}
        parts = [*first, *second]
        batch = Batch(
            self.steps,
            tuple(row.batch_row(count, gated=id(row) in gated) for row, count in parts),
            second_half=len(first) if gated else None,
        )
        self.moves["gated"] += sum(row.gated for row in batch.rows)
        self._hold(batch, parts)
        self._tell_attendant(batch)
        return batch

    def _chunks(self, prefill: Sequence[tuple[str, int]], room: int) -> list[tuple[TierRow, int]]:
        """What of the prompts fits the step, a page at least. Where it goes to the host it ends
        with a page, so that a page arrives there as a whole."""
        room = max(room, self.page_tokens)
        parts = []
        for request_id, remaining in prefill:
            row = self.rows[request_id]
            if row.table is None:
                continue
            count = min(remaining, room)
            if row.tier == "host" and count < remaining:
                count -= (row.computed + count) % self.page_tokens
            if count > 0:
                parts.append((row, count))
                room -= count
        return parts

    def _tell_attendant(self, batch: Batch) -> None:
        halves = [
            [
                GatedRow(row.request_id, row.tokens[0], row.start, row.pages)
                for row in half
                if row.gated
            ]
            for half in batch.halves
        ]
        if self.attendant is not None and any(halves):
            self.send(CPU, GatedRun(batch.number, [half for half in halves if half]))

    def _admit(self, row: TierRow, tier: Tier) -> None:
        """Pages for a waiting row's tokens and the next one, if they are free by now."""
        table = self._pool(tier).take(pages_for(row.state.num_tokens + 1, self.page_tokens))
        if table is not None:
            self.queue.remove(row)
            row.table = table
            row.tier = tier

    def _swap(self, row: TierRow, tier: Tier) -> None:
        """Start to copy a row to the other tier, if it has room by now. Without room on the host
        it makes room on the GPU all the same."""
        assert row.table is not None
        count = pages_for(row.state.num_tokens, self.page_tokens)
        target = self._pool(tier).take(count)
        if target is None:
            if tier == "host":
                self.requeue(row)
            return
        used = pages_for(row.computed, self.page_tokens)
        row.target = target
        kind: CopyKind = "store" if tier == "host" else "load"
        job = self.ledger.open(row.state.id, kind, row.table.pages[:used], target.pages[:used])
        self._pool(row.tier).hold(row.table)
        self._tables[job.number] = (row.table, target)
        self._copies.append(job)
        self.moves["demoted" if tier == "host" else "promoted"] += 1

    def _has_room(self, row: TierRow, count: int) -> bool:
        assert row.table is not None
        missing = pages_for(row.computed + count, self.page_tokens) - len(row.table)
        return missing <= 0 or self._pool(row.tier).grow(row.table, missing)

    def _pool(self, tier: Tier) -> PagePool:
        return self.pool if tier == "gpu" else self.host_pool

    def _hold(self, batch: Batch, parts: Sequence[tuple[TierRow, int]]) -> None:
        """The step is launched with these rows, and names their tables, of two pools."""
        held = []
        for row, count in parts:
            assert row.table is not None
            row.step = batch.number
            row.computed += count
            held.append((self._pool(row.tier), row.table))
            self._pool(row.tier).hold(row.table)
        self._held[batch.number] = held

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult) -> None:
        self.step_tokens = min(2 * self.step_tokens, self.most_tokens)
        if self.attendant is not None and any(row.gated for row in batch.rows):
            self.attendant.succeeded()
        for index, (row, part) in enumerate(self._ended(batch)):
            token = result.tokens[index]
            if row is None or token is None:
                continue
            row.state.append(token, result.logprobs.get(index))
            last = len(row.state.output) - 1
            self.emit_token(token_event(row.state, last, attended=part.gated))
            if row.state.finish_reason is not None:
                self.end(row)

    def fail(self, batch: Batch, error: Exception) -> None:
        """Nothing of the step counts. Where that was the CPU engine, or its size, its rows are run
        again; else they end with it."""
        parts = [(row, part) for row, part in self._ended(batch) if row is not None]
        if isinstance(error, AssistError) and self.attendant is not None:
            self.attendant.failed()
        elif isinstance(error, StepTooLargeError) and batch.num_tokens > 1:
            self.step_tokens = batch.num_tokens // 2
        else:
            logger.error("step %d failed: %s", batch.number, error, exc_info=error)
            for row, _ in parts:
                reason = f"the GPU engine failed in a step: {error}"
                self.send(FRONTEND, Failed(row.state.id, row.state.epoch, reason))
                self.end(row)
            return
        logger.warning("step %d is run again: %s", batch.number, error)
        for row, part in parts:
            row.computed = part.start

    def _ended(self, batch: Batch) -> list[tuple[TierRow | None, BatchRow]]:
        """The step has ended: let its pages go. Its rows; None for one that has ended, too, or is
        not what it was."""
        rows: list[tuple[TierRow | None, BatchRow]] = []
        for part, (pool, table) in zip(batch.rows, self._held.pop(batch.number), strict=True):
            row = self.rows.get(part.request_id)
            if row is not None and row.step != batch.number:
                row = None
            if row is not None:
                row.step = None
            if part.tier == "host" and not part.gated and self.attendant is not None:
                self._land(part.request_id, table, row)
            pool.drop(table)
            rows.append((row, part))
        self._report_drained()
        return rows

    def _report_drained(self) -> None:
        if self._draining is not None and not self._held:
            self.send(FRONTEND, PeerDrained(self._draining))
            self._draining = None

    # -- copies ----------------------------------------------------------------------------------

    def _land(self, request_id: str, table: BlockTable, row: TierRow | None) -> None:
        """See that what a step has computed for these host pages arrives there, even if the row
        has ended."""
        job = self.ledger.open(request_id, "land", [], [])
        self.host_pool.hold(table)
        self._landing[job.number] = (row, table)
        if row is not None:
            row.landing += 1
        self._copies.append(job)

    def take_copies(self) -> list[CopyJob]:
        jobs, self._copies = self._copies, []
        return jobs

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        """The row goes on in its new tier; if the copy failed, or it has ended, nowhere new."""
        self.ledger.close(job)
        if error is not None:
            logger.error("%s of %s failed: %s", job.kind, job.request_id, error, exc_info=error)
        if job.kind == "land":
            self._landed(job, error)
            return
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

    def _landed(self, job: CopyJob, error: Exception | None) -> None:
        row, table = self._landing.pop(job.number)
        self.host_pool.drop(table)
        if row is None:
            return
        row.landing -= 1
        if error is not None and row.table is table and self.rows.get(job.request_id) is row:
            self.requeue(row)

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        super().check_integrity()
        self.host_pool.check_integrity(idle=not self.rows)
        self.ledger.check_integrity()
