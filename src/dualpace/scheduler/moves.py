"""Requests changing engine, seen from the GPU: reservation, handoff, promotion, demotion.

The GPU scheduler's other half. It asks the CPU engine for pages and takes the answers, and it is
the one place that knows whether the CPU engine lives.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Literal

from dualpace.core.messages import (
    CPU,
    FRONTEND,
    AnyMessage,
    Cancel,
    Deny,
    GpuLoad,
    Grant,
    Handoff,
    HostGone,
    HostReport,
    KeepRow,
    Loaded,
    Lost,
    PeerDown,
    PeerDrained,
    PeerUp,
    Recall,
    Release,
    Reserve,
    Return,
    Usable,
    token_event,
)
from dualpace.core.plan import CopyJob
from dualpace.core.request import RequestState
from dualpace.kv.pages import BlockTable, pages_for
from dualpace.scheduler.rows import Phase, Row

if TYPE_CHECKING:
    from dualpace.scheduler.gpu import GpuScheduler

logger = logging.getLogger(__name__)
LOAD_CHANGE = 0.1  # of the GPU's load, before the CPU engine is told again
REMEMBERED_ENDINGS = 256  # more than the CPU engine ends within a message's travel time


class Mover:
    """Speaks with the CPU engine on behalf of the GPU scheduler's rows."""

    def __init__(self, scheduler: GpuScheduler) -> None:
        self.gpu = scheduler
        self.host_up = False
        self.host_gone = False  # and none is to be counted on
        self.host_denied = False
        self.host_silent = False  # it owes an answer, and has not been heard of since
        self.host_pages_total = 0
        self.host_pages_free = 0
        # Ended here, at that epoch, but a step or copy still touches host pages.
        self.ending: dict[str, int] = {}
        self._report = 0
        self._told_usable = 0
        self._told_load = (0.0, 0.0)
        self._draining: int | None = None
        self._ended_there: deque[tuple[str, int]] = deque(maxlen=REMEMBERED_ENDINGS)
        self._copies: list[CopyJob] = []
        self._copy_tables: dict[int, BlockTable] = {}

    @property
    def host_open(self) -> bool:
        """True while it makes sense to ask for host pages."""
        return self.host_up and not self.host_denied and not self.host_silent

    def handle(self, body: AnyMessage) -> None:
        match body:
            case Grant():
                self._granted(body)
            case Deny():
                self._denied(body)
            case Release():
                self._released(body)
            case KeepRow():
                self._kept(body)
            case Return():
                self._returned(body)
            case HostReport():
                self._reported(body)
            case PeerUp():
                self._peer_up(body)
            case PeerDown():
                self._peer_down(body)
            case HostGone():
                self._host_is_gone()
            case _:
                logger.error("the GPU engine has no use for %s", type(body).__name__)

    # -- waiting room: a prompt goes straight to the host ----------------------------------------

    def reserve(self, row: Row) -> None:
        """Ask for host pages for a waiting row."""
        self.gpu.queue.remove(row)
        row.phase = Phase.RESERVING
        self._ask_for_pages(row)

    def land(self, request_id: str) -> None:
        """A step that computes for host pages of the request has ended: see that it arrives there,
        which is a use of those pages like the step."""
        self._copies.append(self.gpu.ledger.open(request_id, "land", [], []))
        self.gpu.ledger.end_use(request_id)

    def hand_off(self, row: Row) -> None:
        """The row's KV lies complete on the host: it is the CPU engine's from here on."""
        state = row.state
        state.epoch += 1
        self.gpu.send(CPU, Handoff(state))
        self.gpu.drop_table(row)
        self.gpu.moves["handed_off"] += 1
        row.phase = Phase.REMOTE
        row.tier = "host"
        row.computed = 0
        row.host_pages = []
        row.host_length = state.num_tokens

    def _ask_for_pages(self, row: Row) -> None:
        tokens = row.num_tokens + 1
        row.host_knows = True
        row.state.epoch += 1  # an answer to an earlier question is none to this
        self.host_pages_free -= pages_for(tokens, self.gpu.page_tokens)
        self.gpu.send(CPU, Reserve(row.id, row.state.epoch, tokens))

    def _granted(self, grant: Grant) -> None:
        row = self._row(grant.request_id, grant.epoch, Phase.RESERVING, Phase.DEMOTING)
        if row is None or row.host_pages:
            self._not_needed(grant)
            return
        row.host_pages = grant.pages
        if row.phase is Phase.RESERVING:
            row.phase = Phase.PREFILL
            row.tier = "host"
        else:
            self.store_when_still(row)

    def _denied(self, deny: Deny) -> None:
        row = self._row(deny.request_id, deny.epoch, Phase.RESERVING, Phase.DEMOTING)
        if row is None or row.host_pages:
            self.gpu.drop(deny)
            return
        self.host_denied = True
        self.host_pages_free += pages_for(row.num_tokens + 1, self.gpu.page_tokens)
        if row.phase is Phase.DEMOTING:
            self.gpu.moves["preempted"] += 1
        self.gpu.enqueue(row)

    def _not_needed(self, body: Grant | Release) -> None:
        """Pages that are in use here already, or of no use (any more): then give them back."""
        self.gpu.drop(body)
        if isinstance(body, Grant):
            request_id, epoch = body.request_id, body.epoch
            answer: Cancel | Loaded = Cancel(request_id, epoch)
        else:
            request_id, epoch = body.state.id, body.state.epoch
            answer = Loaded(request_id, epoch)
        row = self.gpu.rows.get(request_id)
        wanted = row is not None and row.state.epoch == epoch and row.host_pages
        if not wanted and not self.gpu.ledger.in_use(request_id):
            self.gpu.send(CPU, answer)

    # -- demotion --------------------------------------------------------------------------------

    def demote(self, row: Row) -> None:
        """Ask for host pages for a row that decodes on the GPU; it sits out until they come."""
        row.phase = Phase.DEMOTING
        self._ask_for_pages(row)

    def store_when_still(self, row: Row) -> None:
        """Start the copy once the host pages are granted and no launched step writes its KV."""
        if not row.host_pages or row.steps:
            return
        count = pages_for(row.computed, self.gpu.page_tokens)
        assert row.table is not None
        self._copy(row.id, "store", row.table, row.table.pages[:count], row.host_pages[:count])
        row.phase = Phase.STORING

    def rewound(self, row: Row) -> None:
        """A step of a row under demotion has failed. If that was a part of its prompt, there is
        nothing that the CPU engine could go on with."""
        if row.computed == row.state.num_tokens - 1:
            self.store_when_still(row)
            return
        self.gpu.send(CPU, Cancel(row.id, row.state.epoch))
        self.gpu.moves["preempted"] += 1
        self.gpu.enqueue(row)

    # -- promotion -------------------------------------------------------------------------------

    def promote(self, row: Row) -> None:
        """Reserve GPU pages for a row of the CPU engine and ask it back."""
        count = pages_for(row.host_length + 1, self.gpu.page_tokens)
        row.table = self.gpu.pool.take(count)
        if row.table is not None:
            row.phase = Phase.RECALLING
            room = len(row.table) * self.gpu.page_tokens
            self.gpu.send(CPU, Recall(row.id, row.state.epoch, room))

    def leave_there(self, row: Row) -> None:
        """A row that was asked back stays the CPU engine's; what was reserved for it is free."""
        self.gpu.drop_table(row)
        row.phase = Phase.REMOTE

    def _released(self, release: Release) -> None:
        state = release.state
        row = self._row(state.id, state.epoch - 1, Phase.RECALLING, Phase.REMOTE)
        if row is None:
            self._not_needed(release)
            return
        self._came_back(row, state)
        if row.phase is Phase.REMOTE:  # it was answered twice or too late: the seat is gone
            self.gpu.send(CPU, Loaded(state.id, state.epoch))
            self.gpu.moves["returned"] += 1
            self.gpu.enqueue(row)
            return
        row.phase = Phase.LOADING
        row.host_pages = release.pages
        count = pages_for(state.num_tokens - 1, self.gpu.page_tokens)
        assert row.table is not None
        self._copy(row.id, "load", row.table, release.pages[:count], row.table.pages[:count])

    def _kept(self, keep: KeepRow) -> None:
        row = self._row(keep.request_id, keep.epoch, Phase.RECALLING, Phase.REMOTE)
        if row is None:
            self.gpu.drop(keep)
            return
        if not keep.tokens:
            # What tells of a row's end comes before this: here nothing has. The frontend knows its
            # tokens.
            logger.warning("the CPU engine does not have request %s", row.id)
            self.gpu.moves["lost"] += 1
            self.gpu.send(FRONTEND, Lost([(row.id, row.state.epoch + 2)]))
            self.gpu.end(row)
            return
        if row.table is not None and keep.tokens > len(row.table) * self.gpu.page_tokens:
            self.leave_there(row)
        row.host_length = max(row.host_length, keep.tokens)

    # -- copies ----------------------------------------------------------------------------------

    def take_copies(self) -> list[CopyJob]:
        jobs, self._copies = self._copies, []
        return jobs

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        """A copy has ended: its pages may go, and its row goes on."""
        self.gpu.ledger.close(job)
        if job.kind != "land":
            self.gpu.pool.drop(self._copy_tables.pop(job.number))
        self.use_ended(job.request_id)
        if error is not None:
            logger.error("%s of %s failed: %s", job.kind, job.request_id, error, exc_info=error)
        row = self.gpu.rows.get(job.request_id)
        if row is None:
            return
        if row.phase is Phase.STORING and job.kind == "store":
            if error is None:
                self.gpu.moves["demoted"] += 1
                self.hand_off(row)
            else:
                self.gpu.send(CPU, Cancel(row.id, row.state.epoch))
                row.stay()
        elif row.tier == "host" and job.kind == "land" and error is not None:
            if self.host_up:
                self.gpu.send(CPU, Cancel(row.id, row.state.epoch))
            self.gpu.enqueue(row)
        elif row.phase is Phase.LANDING and job.kind == "land":
            if not row.steps and not self.gpu.ledger.in_use(row.id):
                self.hand_off(row)
        elif row.phase is Phase.LOADING and job.kind == "load":
            if self.host_up:
                self.gpu.send(CPU, Loaded(row.id, row.state.epoch))
            row.host_pages = []
            if error is None:
                self.gpu.moves["promoted"] += 1
                row.phase = Phase.DECODE
                row.tier = "gpu"
                row.computed = row.state.num_tokens - 1
            else:
                self.gpu.enqueue(row)

    def _copy(
        self,
        request_id: str,
        kind: Literal["load", "store"],
        table: BlockTable,
        source: list[int],
        target: list[int],
    ) -> None:
        """Start a copy from or to the GPU pages of `table`, which it holds until it has ended."""
        job = self.gpu.ledger.open(request_id, kind, source, target)
        self.gpu.pool.hold(table)
        self._copy_tables[job.number] = table
        self._copies.append(job)

    # -- endings ---------------------------------------------------------------------------------

    def ended(self, row: Row) -> None:
        """The row is off the books: tell the CPU engine, if it knows it, once nothing here
        touches its pages any more."""
        if row.host_tokens is not None:
            self.ended_there(row)
        if row.host_knows and self.host_up:
            self.ending[row.id] = row.state.epoch
            self.use_ended(row.id)

    def ended_there(self, row: Row) -> None:
        """The CPU engine has ended the row, or made some of its tokens. They travel to the frontend
        by another road than its word to us: should it die now, they may never arrive."""
        self._ended_there.append((row.id, row.state.epoch + 2))

    def _came_back(self, row: Row, state: RequestState) -> None:
        if row.host_tokens is None:
            row.host_tokens = len(row.state.output)
        row.state = state

    def _repeat_tokens(self, row: Row) -> None:
        """Emit again what the dead CPU engine made of a row that is here; who has it drops it."""
        state = row.state
        for index in range(row.host_tokens or 0, len(state.output)):
            self.gpu.emit_token(token_event(state, index))
        row.host_tokens = None

    def use_ended(self, request_id: str) -> None:
        """A step or copy on host pages of the request has ended."""
        if request_id in self.ending and not self.gpu.ledger.in_use(request_id):
            self.gpu.tell_gone(request_id, self.ending.pop(request_id))
        self._report_drained()

    def _returned(self, back: Return) -> None:
        state = back.state
        row = self._row(state.id, state.epoch - 1, Phase.REMOTE, Phase.RECALLING)
        if row is None:
            self.gpu.drop(back)
            return
        self._came_back(row, state)
        self.gpu.moves["returned"] += 1
        self.gpu.enqueue(row)

    # -- what is known of the CPU engine ---------------------------------------------------------

    def _reported(self, report: HostReport) -> None:
        if report.number <= self._report:
            self.gpu.drop(report)
            return
        self._report = report.number
        self.host_denied = self.host_silent = False
        self.host_pages_free = report.pages_free
        for request_id, length in report.lengths.items():
            row = self.gpu.rows.get(request_id)
            if row is not None and row.phase is Phase.REMOTE:
                row.host_length = max(row.host_length, length)

    def _peer_up(self, up: PeerUp) -> None:
        self.host_up = True
        self.host_gone = self.host_denied = self.host_silent = False
        self._report = 0
        self.host_pages_total = up.pages
        self.host_pages_free = 0  # until it reports what it makes of the pages that are usable
        self._told_usable = 0
        self._told_load = (0.0, 0.0)

    def repeat_usable(self) -> None:
        """Tell it once more."""
        self._told_usable = 0

    def tell_usable(self) -> None:
        """Tell the CPU engine how many of its pages can be copied, if that has grown."""
        usable = min(self.gpu.usable_host_pages(), self.host_pages_total)
        if self.host_up and usable > self._told_usable:
            self._told_usable = usable
            self.gpu.send(CPU, Usable(usable))

    def tell_load(self, token_rate: float, prefill_share: float) -> None:
        """Tell the CPU engine how busy the GPU is and with what, if that has changed enough."""
        rate, share = self._told_load
        changed = abs(token_rate - rate) > LOAD_CHANGE * rate
        if self.host_up and (changed or abs(prefill_share - share) > LOAD_CHANGE):
            self._told_load = (token_rate, prefill_share)
            self.gpu.send(CPU, GpuLoad(token_rate, prefill_share))

    def _peer_down(self, down: PeerDown) -> None:
        """The CPU engine is dead. What was on its way there stays here; what it held is lost."""
        self.host_up = False
        self.host_pages_total = self.host_pages_free = 0
        self.ending.clear()
        self._draining = down.generation
        lost = list(self._ended_there)  # who has all tokens of these pays no heed
        self._ended_there.clear()
        for row in list(self.gpu.rows.values()):
            row.host_knows = False
            if row.host_tokens is not None:
                self._repeat_tokens(row)
            if row.phase in (Phase.REMOTE, Phase.RECALLING):
                lost.append((row.id, row.state.epoch + 2))
                self.gpu.end(row)
            elif row.phase in (Phase.RESERVING, Phase.LANDING) or (
                row.phase is Phase.PREFILL and row.tier == "host"
            ):
                self.gpu.enqueue(row)
            elif row.phase in (Phase.DEMOTING, Phase.STORING):
                row.stay()
        if lost:
            self.gpu.send(FRONTEND, Lost(lost))
        self._report_drained()

    def _host_is_gone(self) -> None:
        self.host_gone = True
        for row in list(self.gpu.queue):
            self.gpu.refuse_if_too_large(row)

    def _report_drained(self) -> None:
        if self._draining is not None and self.gpu.ledger.quiet:
            self.gpu.send(FRONTEND, PeerDrained(self._draining))
            self._draining = None

    def _row(self, request_id: str, epoch: int, *phases: Phase) -> Row | None:
        """The row that a message speaks of, or None if the message comes too late for it."""
        row = self.gpu.rows.get(request_id)
        if row is None or row.state.epoch != epoch or row.phase not in phases:
            return None
        return row
