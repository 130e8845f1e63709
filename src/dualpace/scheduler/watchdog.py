"""The GPU engine's watchdog: silence and standstill are turned into questions and recomputes.

Sockets between living processes lose nothing, so all of this is for what should not happen. Nothing
here frees a page that a step or copy may still touch: a copy that never ends keeps its pages, and
its row, until the engine is restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING

from dualpace.core.messages import CPU, Cancel, Loaded, Recall
from dualpace.scheduler.patience import LOOK_INTERVAL, Patience
from dualpace.scheduler.planned_row import by_arrival
from dualpace.scheduler.rows import Phase, Row

if TYPE_CHECKING:
    from dualpace.scheduler.gpu import GpuScheduler

logger = logging.getLogger(__name__)
ANSWER_PATIENCE = 10.0  # seconds for an answer that is given at once
SEAT_PATIENCE = 1.0  # the same, where GPU rows may have to sit out for the pages that wait for it
STALL_PATIENCE = 25.0  # seconds in which a row must have a part in a step or copy
QUESTIONS = 4  # to ask in one look whether a row is still the CPU engine's
MOVING = (Phase.DEMOTING, Phase.RECALLING)
LOCAL = (Phase.PREFILL, Phase.DECODE, Phase.LANDING, Phase.DEMOTING, Phase.STORING, Phase.LOADING)


class Watchdog:
    """Looks at the rows now and then, in between two steps."""

    def __init__(self, scheduler: GpuScheduler) -> None:
        self.gpu = scheduler
        self._due = 0.0
        self._answers = Patience(ANSWER_PATIENCE)
        self._seats = Patience(SEAT_PATIENCE)
        self._remote = Patience(ANSWER_PATIENCE)
        self._usable = Patience(ANSWER_PATIENCE)
        self._idle = Patience(STALL_PATIENCE)
        self._queue = Patience(STALL_PATIENCE)

    def look(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + LOOK_INTERVAL
        gpu = self.gpu
        late = self._answers.overdue(now, self._states(Phase.RESERVING))
        late += self._seats.overdue(now, self._states(*MOVING))
        for request_id in late:
            self._unanswered(gpu.rows[request_id])
        for request_id in self._remote.overdue(now, self._states(Phase.REMOTE), most=QUESTIONS):
            # Too little room for any row: the answer tells only whether it is there.
            row = gpu.rows[request_id]
            gpu.send(CPU, Recall(row.id, row.state.epoch, room=0))
        if self._usable.overdue(now, {"host": gpu.mover.host_up}):
            gpu.mover.repeat_usable()
        for request_id in self._idle.overdue(now, self._idle_states()):
            self._compute_anew(gpu.rows[request_id])
        if self._queue.overdue(now, {"queue": gpu.steps} if self._only_waits() else {}):
            oldest = gpu.queue[0]
            logger.warning(
                "nothing runs, and %d requests wait for KV room: the oldest, %s, for %d tokens; "
                "%d of %d GPU pages are free, the host is %s",
                len(gpu.queue), oldest.id, oldest.num_tokens + 1, gpu.pool.free, gpu.pool.total,
                "up" if gpu.mover.host_up else "down",
            )  # fmt: skip

    def _only_waits(self) -> bool:
        rows = self.gpu.rows
        return len(rows) == len(self.gpu.queue) > 0 and not self.gpu.steps_under_way

    def _idle_states(self) -> dict[str, Hashable]:
        """Rows that it is up to this engine to run, and of which nothing is under way. A prompt
        waits in line as long as the first one moves on."""
        rows = [row for row in self.gpu.rows.values() if row.phase in LOCAL]
        prompts = [row for row in rows if row.phase is Phase.PREFILL]
        first = min(prompts, key=by_arrival, default=None)
        line = None if first is None else (first.id, first.computed)
        return {
            row.id: (
                row.phase,
                row.state.epoch,
                line if row.phase is Phase.PREFILL else row.computed,
            )
            for row in rows
            if not row.steps and not self.gpu.ledger.in_use(row.id)
        }

    def _states(self, *phases: Phase) -> dict[str, Hashable]:
        return {
            row.id: (row.phase, row.state.epoch, row.host_length)
            for row in self.gpu.rows.values()
            if row.phase in phases and not (row.phase is Phase.DEMOTING and row.host_pages)
        }

    def _unanswered(self, row: Row) -> None:
        """Withdraw a question for pages, or let go of the seat for a row, which stays there; should
        it come after all, it is computed anew. Nothing more is asked until the CPU engine is heard
        of: GPU rows go on without it."""
        logger.warning("request %s has no answer while %s", row.id, row.phase.value)
        mover = self.gpu.mover
        self.gpu.moves["unanswered"] += 1
        mover.host_silent = True
        if row.phase is Phase.RECALLING:
            mover.leave_there(row)
            return
        self.gpu.send(CPU, Cancel(row.id, row.state.epoch))
        if row.phase is Phase.DEMOTING:
            row.stay()
        else:
            self.gpu.enqueue(row)

    def _compute_anew(self, row: Row) -> None:
        logger.error(
            "request %s has stood still for %g s (%s in %s memory, %d of %d tokens computed, %d of "
            "%d GPU pages are free): computing it anew",
            row.id, STALL_PATIENCE, row.phase.value, row.tier, row.computed, row.num_tokens,
            self.gpu.pool.free, self.gpu.pool.total,
        )  # fmt: skip
        self.gpu.moves["stalled"] += 1
        if self.gpu.mover.host_up and row.phase is Phase.LOADING:
            self.gpu.send(CPU, Loaded(row.id, row.state.epoch))
        elif self.gpu.mover.host_up and row.host_pages:
            self.gpu.send(CPU, Cancel(row.id, row.state.epoch))
        self.gpu.enqueue(row)
