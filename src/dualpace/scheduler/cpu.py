"""The CPU engine's scheduler: owner of the host page pool and of the host-resident requests.

It decodes what it has been handed, at its own pace, and answers the GPU engine's questions at
once, also in the middle of an iteration.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from dualpace.core.errors import AssistError
from dualpace.core.history import TokenHistory
from dualpace.core.messages import (
    FRONTEND,
    GPU,
    AnyMessage,
    Cancel,
    Deny,
    Failed,
    GpuLoad,
    Grant,
    Handoff,
    HostReport,
    KeepRow,
    Loaded,
    Recall,
    Release,
    Reserve,
    Return,
    Usable,
    token_event,
)
from dualpace.core.plan import Batch, BatchRow, CopyJob, Route, StepResult
from dualpace.core.request import RequestState
from dualpace.kv.pages import BlockTable, PagePool, pages_for
from dualpace.policy.view import CpuView, Policy, RowView
from dualpace.scheduler.base import SchedulerBase
from dualpace.scheduler.patience import LOOK_INTERVAL, Patience

logger = logging.getLogger(__name__)
ASSIST_RETRIES = 3  # iterations in a row that the GPU engine may let down before rows fail
REPORTED_LENGTHS = 16  # rows whose length each HostReport names
REPORT_INTERVAL = 5.0  # seconds after which a report is made though nothing has changed
REMEMBERED_REQUESTS = 8192  # whose old messages are known as such
CLAIM_PATIENCE = 10.0  # seconds after which the GPU engine is reminded of pages kept for it


@dataclass(eq=False)
class HostRow:
    """A request that the CPU engine decodes. All its tokens but the last have KV.

    step: the iteration that it takes part in; last_step: the last one that it took part in, or that
    there had been when it came: who has waited longer than it goes first.
    """

    state: RequestState
    table: BlockTable
    step: int | None = None
    last_step: int = 0
    history: TokenHistory = field(default_factory=TokenHistory)

    @property
    def computed(self) -> int:
        return self.state.num_tokens - 1


class Claim(NamedTuple):
    """Host pages that the GPU engine uses: a grant it writes, or a load it reads.

    message: what told it so.
    """

    epoch: int
    table: BlockTable
    message: Grant | Release


class CpuScheduler(SchedulerBase):
    """Host pages are held by a grant, then by the row, then (recalled) by the load.

    Starts without pages and has as many as the GPU engine has said it can use, up to `pages`.
    """

    def __init__(self, policy: Policy, pages: int, page_tokens: int, max_rows: int) -> None:
        super().__init__(GPU, PagePool(0))
        self.pages = pages
        self.policy = policy
        self.page_tokens = page_tokens
        self.max_rows = max_rows
        self.rows: dict[str, HostRow] = {}
        self.grants: dict[str, Claim] = {}
        self.loads: dict[str, Claim] = {}
        self.route: Route = "local"  # of the last iteration
        self.gpu_load = GpuLoad(0.0, 0.0)
        self._failed_assists = 0  # in a row
        self._latest: dict[str, int] = {}  # epoch last heard of, by request, the last heard of last
        self._reported: tuple[int, int, int] | None = None
        self._reports = 0
        self._report_due = 0.0
        self._look_due = 0.0
        self._reminders = Patience(CLAIM_PATIENCE)

    # -- drain -----------------------------------------------------------------------------------

    def handle(self, body: AnyMessage) -> None:
        match body:
            case Reserve():
                self._reserve(body)
            case Cancel():
                self._cancel(body, self.grants)
            case Handoff():
                self._take_over(body)
            case Recall():
                self._recall(body)
            case Loaded():
                self._cancel(body, self.loads)
            case GpuLoad():
                self.gpu_load = body
            case Usable():
                self.pool.extend(max(self.pool.total, min(body.pages, self.pages)))
            case _:
                logger.error("the CPU engine has no use for %s", type(body).__name__)

    def _reserve(self, ask: Reserve) -> None:
        """Grant the pages, unless that would leave less than one free page per request here."""
        request_id, epoch = ask.request_id, ask.epoch
        held = self.grants.get(request_id)
        if held is not None and held.epoch == epoch:
            self.send(GPU, held.message)
            return
        if epoch <= self._latest.get(request_id, -1):
            self.drop(ask)
            return
        self._note_epoch(request_id, epoch)
        # Who asks anew owns the request and has no use for the old: something has been lost.
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.pool.drop(row.table)
        self._drop_claim(self.grants, request_id, epoch)
        self._drop_claim(self.loads, request_id, epoch)
        count = pages_for(ask.tokens, self.page_tokens)
        table = None
        if self.pool.free - count >= len(self.rows) + len(self.grants):
            table = self.pool.take(count)
        if table is None:
            self.send(GPU, Deny(request_id, epoch))
        else:
            grant = Grant(request_id, epoch, list(table.pages))
            self.grants[request_id] = Claim(epoch, table, grant)
            self.send(GPU, grant)

    def _note_epoch(self, request_id: str, epoch: int) -> None:
        self._latest[request_id] = max(epoch, self._latest.pop(request_id, -1))
        if len(self._latest) > REMEMBERED_REQUESTS:
            del self._latest[next(iter(self._latest))]

    def _cancel(self, cancel: Cancel | Loaded, claims: dict[str, Claim]) -> None:
        claim = claims.get(cancel.request_id)
        if claim is None or claim.epoch != cancel.epoch:
            self.drop(cancel)
        else:
            self._drop_claim(claims, cancel.request_id, cancel.epoch)

    def _take_over(self, handoff: Handoff) -> None:
        """The grant's pages become the row's."""
        state = handoff.state
        grant = self.grants.get(state.id)
        if grant is None or grant.epoch != state.epoch - 1:
            self.drop(handoff)
            return
        del self.grants[state.id]
        self._note_epoch(state.id, state.epoch)
        self.rows[state.id] = HostRow(state, grant.table, last_step=self.steps)

    def _recall(self, recall: Recall) -> None:
        """Release the committed state at once; a row in flight is discarded when it commits."""
        row = self.rows.get(recall.request_id)
        load = self.loads.get(recall.request_id)
        if row is None and load is not None and load.epoch == recall.epoch + 1:
            self.send(GPU, load.message)
            return
        if row is None or row.state.epoch != recall.epoch or row.state.num_tokens > recall.room:
            tokens = 0 if row is None else row.state.num_tokens
            self.send(GPU, KeepRow(recall.request_id, recall.epoch, tokens))
            return
        del self.rows[recall.request_id]
        row.state.epoch += 1
        release = Release(row.state, list(row.table.pages))
        self.loads[row.state.id] = Claim(row.state.epoch, row.table, release)
        self.moves["released"] += 1
        self.send(GPU, release)

    def on_peer_end(self, request_id: str, last_epoch: int) -> None:
        self._note_epoch(request_id, last_epoch)
        self._drop_claim(self.grants, request_id, last_epoch)
        self._drop_claim(self.loads, request_id, last_epoch)

    def _drop_claim(self, claims: dict[str, Claim], request_id: str, last_epoch: int) -> None:
        claim = claims.get(request_id)
        if claim is not None and claim.epoch <= last_epoch:
            del claims[request_id]
            self.pool.drop(claim.table)
            self._reported = None  # granted and given back at once, the free pages look unchanged

    def on_end(self, request_id: str, last_epoch: int) -> None:
        """Abort, or the GPU engine ended it. Grants and loads stay until the GPU lets go."""
        row = self.rows.get(request_id)
        if row is not None and row.state.epoch <= last_epoch:
            self.end(row)

    def end(self, row: HostRow) -> None:
        request_id = row.state.id
        del self.rows[request_id]
        self.pool.drop(row.table)
        self.tell_gone(request_id, row.state.epoch)

    # -- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Batch | None:
        self.report_stats(now, len(self.rows), 0)
        self._repeat_what_was_told(now)
        if not self.rows:
            return None
        decision = self.policy.plan_cpu(self.view(now))
        for request_id in decision.send_back:
            self._send_back(self.rows[request_id])
        parts = [
            row
            for row in (self.rows[request_id] for request_id in decision.run)
            if self._has_room(row)
        ]
        if not parts:
            return None
        self.steps += 1
        self.route = decision.route
        batch = Batch(self.steps, tuple(self._batch_row(row) for row in parts), self.route)
        for row in parts:
            row.step = row.last_step = batch.number
        self.hold_for_step(batch.number, (row.table for row in parts))
        return batch

    def view(self, now: float) -> CpuView:
        """The books as the policy may see them."""
        rows = sorted(self.rows.values(), key=lambda row: row.state.arrival)
        return CpuView(
            now=now,
            page_tokens=self.page_tokens,
            pages_free=self.pool.free,
            max_rows=self.max_rows,
            rows=tuple(
                RowView(
                    row.state.id,
                    row.state.arrival,
                    row.state.num_tokens,
                    row.computed,
                    len(row.table),
                    "host",
                    row.last_step,
                )
                for row in rows
            ),
            route=self.route,
            token_rate=self.gpu_load.token_rate,
            prefill_share=self.gpu_load.prefill_share,
        )

    def _send_back(self, row: HostRow) -> None:
        """No page for it: it goes back to the waiting queue with its tokens."""
        del self.rows[row.state.id]
        self.pool.drop(row.table)
        row.state.epoch += 1
        self.moves["sent_back"] += 1
        self.send(GPU, Return(row.state))

    def _has_room(self, row: HostRow) -> bool:
        return row.computed < len(row.table) * self.page_tokens or self.pool.grow(row.table)

    def _batch_row(self, row: HostRow) -> BatchRow:
        state = row.state
        return BatchRow(
            request_id=state.id,
            tokens=[state.last_token],
            start=row.computed,
            pages=list(row.table.pages),
            tier="host",
            sample=True,
            params=state.params,
            banned_ids=state.banned_ids(),
            history=row.history.of(state),
        )

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult) -> None:
        self._failed_assists = 0
        self.step_ended(batch.number)
        for index, (part, token) in enumerate(zip(batch.rows, result.tokens, strict=True)):
            row = self.rows.get(part.request_id)
            if row is None or row.step != batch.number or token is None:
                continue  # it ended or was recalled while the iteration ran
            row.step = None
            state = row.state
            state.append(token, result.logprobs.get(index))
            self.emit_token(token_event(state, len(state.output) - 1))
            finish = state.finish_reason
            if finish is not None:
                self.end(row)

    def fail(self, batch: Batch, error: Exception) -> None:
        logger.error("iteration %d failed: %s", batch.number, error, exc_info=error)
        self.step_ended(batch.number)
        self._failed_assists += 1
        if isinstance(error, AssistError) and self._failed_assists <= ASSIST_RETRIES:
            for part in batch.rows:  # they stay as they were, and are run again
                row = self.rows.get(part.request_id)
                if row is not None and row.step == batch.number:
                    row.step = None
            return
        for part in batch.rows:
            row = self.rows.get(part.request_id)
            if row is not None and row.step == batch.number:
                reason = f"the CPU engine failed in an iteration: {error}"
                self.send(FRONTEND, Failed(part.request_id, row.state.epoch, reason))
                self.end(row)

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        raise AssertionError("the CPU engine starts no copies")

    def take_messages(self) -> list[tuple[str, AnyMessage]]:
        self._report()
        return super().take_messages()

    def _repeat_what_was_told(self, now: float) -> None:
        """Whatever of it was lost is made good; the GPU engine drops what it knows already."""
        if now >= self._report_due:
            self._report_due = now + REPORT_INTERVAL
            self._reported = None
        if now < self._look_due:
            return
        self._look_due = now + LOOK_INTERVAL
        claims = {f"{claim.epoch} {key}": claim for key, claim in self.grants.items()}
        claims |= {f"{claim.epoch} {key}": claim for key, claim in self.loads.items()}
        for key in self._reminders.overdue(now, dict.fromkeys(claims)):
            self.send(GPU, claims[key].message)

    def _report(self) -> None:
        """Tell the GPU scheduler what it may count on, whenever that has changed."""
        now = (self.steps, self.pool.free, len(self.rows))
        if now == self._reported:
            return
        self._reported = now
        oldest = sorted(self.rows.values(), key=lambda row: row.state.arrival)[:REPORTED_LENGTHS]
        lengths = {row.state.id: row.state.num_tokens for row in oldest}
        self._reports += 1
        self.send(GPU, HostReport(self._reports, self.pool.free, len(self.rows), lengths))

    def check_integrity(self) -> None:
        super().check_integrity()
        if not self.rows and not self.grants and not self.loads:
            self.pool.check_integrity(idle=True)
