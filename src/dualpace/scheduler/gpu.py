"""The GPU engine's scheduler: owner of the waiting queue and of the GPU page pool.

Applies what the policy decides, builds the steps, and keeps each request's life in order (see
`rows.Phase`). Moving requests between the engines is in `moves`.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable

from dualpace.core.errors import StepTooLargeError
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import CPU, FRONTEND, AnyMessage, Failed, Submit, token_event
from dualpace.core.plan import Batch, CopyJob, StepResult
from dualpace.core.request import RequestState
from dualpace.kv.ledger import TransferLedger
from dualpace.kv.pages import PagePool, pages_for
from dualpace.policy.view import GpuView, Policy, RowView
from dualpace.scheduler.base import SchedulerBase
from dualpace.scheduler.load import StepLoad
from dualpace.scheduler.moves import Mover
from dualpace.scheduler.planned_row import by_arrival
from dualpace.scheduler.rows import HOSTWARD, Phase, Row
from dualpace.scheduler.watchdog import Watchdog

logger = logging.getLogger(__name__)
ALL_PAGES = 2**62
VIEWED_HOST_ROWS = 16  # how many of the oldest host rows a policy sees
VIEWED_WAITING_ROWS = 64  # likewise: more than a step begins with, fewer than hold up its planning


class GpuScheduler(SchedulerBase):
    """Decides nothing itself: `policy` does.

    Plans ahead: a row of a launched step may take part in the next one before its token is known.
    """

    def __init__(
        self,
        policy: Policy,
        pages: int,
        page_tokens: int,
        max_rows: int,
        max_tokens: int,
        *,
        usable_host_pages: Callable[[], int] = lambda: ALL_PAGES,
    ) -> None:
        """usable_host_pages: how many of the host's pages, from 0 on, can be copied by now."""
        super().__init__(CPU, PagePool(pages))
        self.usable_host_pages = usable_host_pages
        self.policy = policy
        self.page_tokens = page_tokens
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.step_tokens = max_tokens  # fewer for a while after a step that was too large
        self.rows: dict[str, Row] = {}
        self.queue: list[Row] = []  # WAITING, in arrival order
        self.ledger = TransferLedger()
        self.mover = Mover(self)
        self.watchdog = Watchdog(self)
        self.load = StepLoad()

    # -- drain -----------------------------------------------------------------------------------

    def handle(self, body: AnyMessage) -> None:
        if isinstance(body, Submit):
            self.submit(body.state)
        else:
            self.mover.handle(body)

    def submit(self, state: RequestState) -> None:
        """Queue a new request at its arrival place."""
        if state.id in self.rows:
            logger.error("request %s was submitted twice; the second is dropped", state.id)
            return
        row = Row(state)
        self.rows[state.id] = row
        self.enqueue(row)

    def enqueue(self, row: Row) -> None:
        """To the waiting queue, with nothing computed."""
        row.phase = Phase.WAITING
        row.tier = "gpu"
        row.computed = 0
        row.forget_steps()
        row.host_pages = []
        self.drop_table(row)
        row.queued = row.view()
        bisect.insort(self.queue, row, key=by_arrival)
        if self.mover.host_gone:
            self.refuse_if_too_large(row)

    def refuse_if_too_large(self, row: Row) -> None:
        """End a waiting row that would need a host to count on."""
        needed, held = row.state.num_tokens + 1, self.pool.total * self.page_tokens
        if needed > held:
            reason = (
                f"the request needs KV room for {needed} tokens; the GPU has {held}, and the CPU "
                f"engine is down"
            )
            self.send(FRONTEND, Failed(row.id, row.state.epoch, reason))
            self.end(row)

    def on_end(self, request_id: str, last_epoch: int) -> None:
        row = self.rows.get(request_id)
        if row is not None and row.state.epoch <= last_epoch:
            self.end(row)

    def on_peer_end(self, request_id: str, last_epoch: int) -> None:
        row = self.rows.get(request_id)
        if row is not None and row.state.epoch <= last_epoch:
            self.mover.ended_there(row)

    def end(self, row: Row) -> None:
        """Take the row off the books; its pages are free once no step or copy holds them."""
        del self.rows[row.id]
        if row.phase is Phase.WAITING:
            self.queue.remove(row)
        self.drop_table(row)
        self.mover.ended(row)

    def drop_table(self, row: Row) -> None:
        """The row lets go of its GPU pages, if it has any."""
        if row.table is not None:
            self.pool.drop(row.table)
            row.table = None

    # -- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Batch | None:
        self.report_stats(now, len(self.rows) - len(self.queue), len(self.queue))
        self.watchdog.look(now)
        self.load.look(now)
        if not self.rows:
            return None
        by_phase = self._by_phase()
        decision = self.policy.plan_gpu(self.view(now, by_phase))
        for request_id in decision.preempt:
            self.enqueue(self.rows[request_id])
            self.moves["preempted"] += 1
        for request_id in decision.demote:
            self.mover.demote(self.rows[request_id])
        for request_id in decision.promote:
            self.mover.promote(self.rows[request_id])
        for request_id in decision.admit:
            self.admit(self.rows[request_id])
        for request_id in decision.reserve:
            self.mover.reserve(self.rows[request_id])
        self.mover.tell_load(decision.token_rate, self.load.prefill_share)
        batch = self.build(by_phase[Phase.DECODE], decision.prefill)
        if batch is not None:
            self.load.launched(batch.number, decision.prefill_share, decision.seconds)
        return batch

    def _by_phase(self) -> dict[Phase, list[Row]]:
        """All rows, those that a policy sees in arrival order; without those that need no further
        step on the GPU, as their last token is on its way."""
        by_phase: dict[Phase, list[Row]] = {phase: [] for phase in Phase}
        for row in self.rows.values():
            by_phase[row.phase].append(row)
        by_phase[Phase.DECODE] = [row for row in by_phase[Phase.DECODE] if not row.at_length]
        for phase in (Phase.DECODE, Phase.PREFILL, Phase.REMOTE):
            by_phase[phase].sort(key=by_arrival)
        return by_phase

    def view(self, now: float, by_phase: dict[Phase, list[Row]]) -> GpuView:
        """The books as the policy may see them."""
        prefilling, remote = by_phase[Phase.PREFILL], by_phase[Phase.REMOTE]
        hostward = [row for phase in HOSTWARD for row in by_phase[phase]]
        hostward += (row for row in prefilling if row.tier == "host")
        return GpuView(
            now=now,
            page_tokens=self.page_tokens,
            pages_total=self.pool.total,
            pages_free=self.pool.free,
            max_rows=self.max_rows,
            max_tokens=self.step_tokens,
            prefill_share=self.load.prefill_share,
            overrun=self.load.overrun,
            decoding=tuple(row.view() for row in by_phase[Phase.DECODE]),
            prefilling=tuple(row.view() for row in prefilling),
            waiting=tuple(self._placeable()),
            host=tuple(
                row.view() for row in remote[:VIEWED_HOST_ROWS] if not self.mover.host_silent
            ),
            moving=len(by_phase[Phase.RECALLING]) + len(by_phase[Phase.LOADING]),
            demoting_pages=sum(
                len(row.pages)
                for phase in (Phase.DEMOTING, Phase.STORING)
                for row in by_phase[phase]
            ),
            host_open=self._host_open,
            host_pages_total=self.mover.host_pages_total,
            host_pages_free=self.mover.host_pages_free,
            host_rows=len(remote) + len(hostward),
            host_context=sum(row.host_length for row in remote)
            + sum(row.num_tokens for row in hostward),
        )

    @property
    def _host_open(self) -> bool:
        return self.policy.uses_host and self.mover.host_open

    def _placeable(self) -> list[RowView]:
        """The first of the waiting rows, without those that wait for a tier that is down: they do
        not stand in the way of the others. Nor do those that wait for the host, being too long for
        any seat, where they are all that would be seen."""
        seat = self.pool.total * self.page_tokens
        most = max(seat, self.mover.host_pages_total * self.page_tokens if self._host_open else 0)
        rows = (row.queued for row in self.queue if row.queued.tokens < most)
        count = min(self.max_rows, VIEWED_WAITING_ROWS)
        first = list(itertools.islice(rows, count))
        if seat and not any(row.tokens < seat for row in first):
            could_sit = (row for row in rows if row.tokens < seat)
            first += itertools.islice(could_sit, count)
        return first

    def admit(self, row: Row) -> None:
        """Give a waiting row GPU pages for all its tokens and the next."""
        count = pages_for(row.state.num_tokens + 1, self.page_tokens)
        row.table = self.pool.take(count)
        if row.table is not None:
            self.queue.remove(row)
            row.phase = Phase.PREFILL

    def build(self, decoding: list[Row], prefill: tuple[tuple[str, int], ...]) -> Batch | None:
        """The step: every row of `decoding` that still decodes and has (or gets) a page, then the
        prompts' chunks. Where pages are short, the first rows grow."""
        decode = Phase.DECODE
        parts = [(row, 1) for row in decoding if row.phase is decode and self._has_room(row)]
        for request_id, count in prefill:
            row = self.rows[request_id]
            if row.phase is Phase.PREFILL:
                parts.append((row, count))
        if self.step_tokens < self.max_tokens:
            parts = _first_tokens(parts, self.step_tokens)
        if not parts:
            return None
        self.steps += 1
        batch = Batch(self.steps, tuple(row.batch_row(count) for row, count in parts))
        for (row, _), part in zip(parts, batch.rows, strict=True):
            row.launched(batch.number, part)
            if row.tier == "host":
                self.ledger.begin_use(row.id)
        self.hold_for_step(batch.number, (row.table for row, _ in parts if row.table is not None))
        return batch

    def _has_room(self, row: Row) -> bool:
        if row.computed < len(row.pages) * self.page_tokens:
            return True
        return row.table is not None and self.pool.grow(row.table)

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult) -> None:
        self.load.ended(batch.number)
        self._let_go(batch)
        self.step_tokens = min(2 * self.step_tokens, self.max_tokens)
        for index, (part, token) in enumerate(zip(batch.rows, result.tokens, strict=True)):
            row = self.rows.get(part.request_id)
            if row is None or batch.number not in row.steps:
                continue  # it ended, or was preempted, while the step ran
            row.steps.remove(batch.number)
            if token is not None:
                row.pending -= 1
                self.append(row, token, result.logprobs.get(index))

    def append(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        """The row's next token: emit it, then end the row, pass it on, or let it go on."""
        state = row.state
        state.append(token, logprobs)
        event = token_event(state, len(state.output) - 1)
        self.emit_token(event)
        if event.finish is not None:
            self.end(row)
        elif row.phase is Phase.DEMOTING:
            self.mover.store_when_still(row)

    def fail(self, batch: Batch, error: Exception) -> None:
        self.load.failed(batch.number)
        self._let_go(batch)
        rows = []
        for part in batch.rows:
            row = self.rows.get(part.request_id)
            if row is not None and batch.number in row.steps:
                rows.append((row, part))
        if isinstance(error, StepTooLargeError) and batch.num_tokens > 1:
            # Halved until it fits, or until one row alone is to blame.
            self.step_tokens = batch.num_tokens // 2
            logger.warning("step %d: %s; retried in smaller steps", batch.number, error)
            for row, part in rows:
                row.rewind(part)
                if row.phase is Phase.DEMOTING:
                    self.mover.rewound(row)
            return
        logger.error("step %d failed: %s", batch.number, error, exc_info=error)
        for row, _ in rows:
            reason = f"the GPU engine failed in a step: {error}"
            self.send(FRONTEND, Failed(row.id, row.state.epoch, reason))
            self.end(row)

    def _let_go(self, batch: Batch) -> None:
        self.step_ended(batch.number)
        for part in batch.rows:
            if part.tier == "host":
                self.mover.land(part.request_id)

    # -- copies ----------------------------------------------------------------------------------

    def take_messages(self) -> list[tuple[str, AnyMessage]]:
        self.mover.tell_usable()
        return super().take_messages()

    def take_copies(self) -> list[CopyJob]:
        return self.mover.take_copies()

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        self.mover.copied(job, error)

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        super().check_integrity()
        self.ledger.check_integrity()
        waiting = [row for row in self.rows.values() if row.phase is Phase.WAITING]
        if sorted(map(id, waiting)) != sorted(map(id, self.queue)):
            raise AssertionError("the waiting queue does not hold the waiting rows")
        if any(row.queued != row.view() for row in self.queue):
            raise AssertionError("a waiting row is not what it was when it was queued")
        if not self.rows and not self.mover.ending:
            self.pool.check_integrity(idle=True)


def _first_tokens(parts: list[tuple[Row, int]], limit: int) -> list[tuple[Row, int]]:
    """The first `limit` positions of a step's parts."""
    first = []
    for row, count in parts:
        count = min(count, limit)
        limit -= count
        if count:
            first.append((row, count))
    return first
