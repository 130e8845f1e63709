"""The scheduler of gated steps: one engine that owns both tiers, as NEO does.

Host rows have no pace of their own: they decode in those steps for which the policy opens the
gate. The CPU engine is told of each such step (`gated_cpu` is its scheduler) and owns nothing:
should it die in one, all KV is still there, and the rows are run again. Copies between the tiers
are in `swaps`.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Mapping, Sequence

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
from dualpace.core.plan import Batch, BatchRow, CopyJob, StepResult, Tier
from dualpace.kv.pages import BlockTable, PagePool, pages_for
from dualpace.policy.view import GpuDecision, GpuView, Policy
from dualpace.scheduler.attendant import Attendant
from dualpace.scheduler.base import SchedulerBase
from dualpace.scheduler.gated_rows import TierRow
from dualpace.scheduler.planned_row import by_arrival
from dualpace.scheduler.swaps import Swaps

logger = logging.getLogger(__name__)
NO_LIMIT = 2**62


class GatedScheduler(SchedulerBase):
    """Plans ahead as `GpuScheduler` does, but for gated steps: nothing is under way beside one.

    pages, host_pages: of the two pools.
    """

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
        whole_prompts: bool = False,
        usable_host_pages: Callable[[], int] = lambda: NO_LIMIT,
    ) -> None:
        """attendant: the CPU engine, None where the executor attends for host rows by itself, as
        the simulator's does; whole_prompts: a step takes as many positions as the policy says,
        which takes prompts whole, as NEO does, instead of `max_tokens`; usable_host_pages: how many
        of the host's pages, from 0 on, can be copied by now."""
        super().__init__(CPU, PagePool(pages))
        self.host_pages = host_pages
        self.host_pool = PagePool(min(host_pages, usable_host_pages()))
        self._pools: Mapping[Tier, PagePool] = {"gpu": self.pool, "host": self.host_pool}
        self.usable_host_pages = usable_host_pages
        self.policy = policy
        self.attendant = attendant
        self.page_tokens = page_tokens
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        # Positions that a step may have: fewer for a while after one that was too large.
        self.step_tokens = self.most_tokens = NO_LIMIT if whole_prompts else max_tokens
        self.rows: dict[str, TierRow] = {}
        self.queue: list[TierRow] = []  # without pages, in arrival order
        self.swaps = Swaps(self._pools, page_tokens)
        # Generation of a dead CPU engine, and the last step that was launched before.
        self._draining: tuple[int, int] | None = None
        self._gated_step = 0  # the last one
        self._held: dict[int, list[tuple[PagePool, BlockTable]]] = {}  # by step, oldest first

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return tuple(self._pools.values())

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
                self._draining = body.generation, self.steps
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
        del self.rows[row.id]
        if row.table is None:
            self.queue.remove(row)
        else:
            self._pools[row.tier].drop(row.table)

    def requeue(self, row: TierRow) -> None:
        """Back to the waiting queue, with nothing computed."""
        assert row.table is not None
        self._pools[row.tier].drop(row.table)
        row.table = None
        row.computed = 0
        row.forget_steps()
        bisect.insort(self.queue, row, key=by_arrival)
        self.moves["preempted"] += 1

    # -- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Batch | None:
        self.report_stats(now, len(self.rows) - len(self.queue), len(self.queue))
        if self.host_pool.total < self.host_pages:
            self.host_pool.extend(min(self.host_pages, self.usable_host_pages()))
        if not self.rows or self._gated_step in self._held:
            return None
        decision = self.policy.plan_gpu(self.view(now))
        if self._held and self._must_wait(decision):
            return None  # nothing of it is done: it is decided afresh then
        for request_id in decision.demote:
            self._swap_out(self.rows[request_id])
        for request_id in decision.promote:
            if not self.swaps.swap(self.rows[request_id], "gpu"):
                break
            self.moves["promoted"] += 1
        self._admit(decision.admit, "gpu")
        self._admit(decision.reserve, "host")
        return self.build(decision)

    def view(self, now: float) -> GpuView:
        """The books as the policy may see them, as they will be once all launched steps have ended;
        rows that are being copied are in none."""
        ready = sorted(
            (row for row in self.rows.values() if row.table is not None and row.ready),
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
            decoding=tuple(row.view() for row in ready if row.decodes and row.tier == "gpu"),
            prefilling=tuple(row.view() for row in ready if not row.decodes),
            waiting=tuple(row.view() for row in self.queue[: self.max_rows]),
            host=tuple(row.view() for row in ready if row.decodes and row.tier == "host"),
            pages_moving=sum(
                len(row.target) for row in moving if row.target and row.tier == "host"
            ),
            host_open=self.attendant is None or self.attendant.ready(now),
            host_pages_total=self.host_pool.total,
            host_pages_free=self.host_pool.free,
        )

    def _must_wait(self, decision: GpuDecision) -> bool:
        """True if that needs the step under way to have ended: a gate that opens, KV that leaves
        while it is computed, decodes for which pages may then be free."""
        if any(decision.gate) or any(self.rows[each].steps for each in decision.demote):
            return True
        missing = sum(max(0, self._missing_pages(row, 1)) for row in self._decodes(decision))
        return missing > self.pool.free

    def _decodes(self, decision: GpuDecision) -> list[TierRow]:
        """The GPU's, in arrival order."""
        prompts = dict(decision.prefill)  # one of one token looks like a decode
        rows = (
            row
            for row in self.rows.values()
            if row.decodes and row.tier == "gpu" and row.ready and row.id not in prompts
        )
        return sorted(rows, key=by_arrival)

    def build(self, decision: GpuDecision) -> Batch | None:
        """GPU decodes, prompts and the first half's host rows; then the second half's."""
        decodes = self._decodes(decision)[: self.step_tokens]
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
        if gated:
            self._gated_step = batch.number
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

    def _admit(self, request_ids: Sequence[str], tier: Tier) -> None:
        """Pages for the waiting rows' tokens and the next one, until they are not free by now."""
        for request_id in request_ids:
            row = self.rows[request_id]
            count = pages_for(row.state.num_tokens + 1, self.page_tokens)
            table = self._pools[tier].take(count)
            if table is None:
                return
            self.queue.remove(row)
            row.table = table
            row.tier = tier

    def _swap_out(self, row: TierRow) -> None:
        """Without room on the host it makes room on the GPU all the same."""
        if self.swaps.swap(row, "host"):
            self.moves["demoted"] += 1
        else:
            self.requeue(row)

    def _has_room(self, row: TierRow, count: int) -> bool:
        assert row.table is not None
        missing = self._missing_pages(row, count)
        return missing <= 0 or self._pools[row.tier].grow(row.table, missing)

    def _missing_pages(self, row: TierRow, count: int) -> int:
        """For the next `count` positions; less than 0 if it has more."""
        return pages_for(row.computed + count, self.page_tokens) - len(row.pages)

    def _hold(self, batch: Batch, parts: Sequence[tuple[TierRow, int]]) -> None:
        """The step is launched with these rows, and names their tables, of two pools."""
        held = []
        for (row, _), part in zip(parts, batch.rows, strict=True):
            assert row.table is not None
            row.launched(batch.number, part)
            held.append((self._pools[row.tier], row.table))
            self._pools[row.tier].hold(row.table)
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
            row.pending -= 1
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
                self.send(FRONTEND, Failed(row.id, row.state.epoch, reason))
                self.end(row)
            return
        logger.warning("step %d is run again: %s", batch.number, error)
        for row, part in parts:
            row.rewind(part)

    def _ended(self, batch: Batch) -> list[tuple[TierRow | None, BatchRow]]:
        """The step has ended: let its pages go. Its rows; None for one that has ended, too, or is
        not what it was."""
        rows: list[tuple[TierRow | None, BatchRow]] = []
        for part, (pool, table) in zip(batch.rows, self._held.pop(batch.number), strict=True):
            row = self.rows.get(part.request_id)
            if row is not None and batch.number not in row.steps:
                row = None
            if row is not None:
                row.steps.remove(batch.number)
            if part.tier == "host" and not part.gated and self.attendant is not None:
                self.swaps.land(part.request_id, table, row)
            pool.drop(table)
            rows.append((row, part))
        self._report_drained()
        return rows

    def _report_drained(self) -> None:
        """The CPU engine has died, and every step that was under way then has ended."""
        if self._draining is None:
            return
        generation, last = self._draining
        if all(number > last for number in self._held):
            self.send(FRONTEND, PeerDrained(generation))
            self._draining = None

    # -- copies ----------------------------------------------------------------------------------

    def take_copies(self) -> list[CopyJob]:
        return self.swaps.take()

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        row = self.rows.get(job.request_id)
        if not self.swaps.ended(job, row, error):
            assert row is not None
            self.requeue(row)

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        super().check_integrity()
        self.host_pool.check_integrity(idle=not self.rows)
        self.swaps.check_integrity()
