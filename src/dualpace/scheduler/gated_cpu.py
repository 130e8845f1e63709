"""The CPU engine's scheduler under gated steps: it does what it is told, and owns nothing.

Requests and the pages of both tiers are the GPU engine's (scheduler/gated.py), which tells of each
step that needs the host's attention. How that comes out either side sees in the mailbox.
"""

from __future__ import annotations

import logging

from dualpace.core.messages import GPU, AnyMessage, GatedRow, GatedRun
from dualpace.core.plan import Batch, BatchRow, CopyJob, StepResult
from dualpace.core.sampling import DecodeParams
from dualpace.kv.pages import PagePool
from dualpace.scheduler.base import SchedulerBase

logger = logging.getLogger(__name__)


class GatedCpuScheduler(SchedulerBase):
    """Runs the part of the GPU engine's step that it was last told of."""

    def __init__(self) -> None:
        super().__init__(GPU, PagePool(0))
        self._next: GatedRun | None = None

    def handle(self, body: AnyMessage) -> None:
        if isinstance(body, GatedRun):
            # The GPU engine has one gated step at a time: an earlier one is given up.
            self._next = body
        else:
            logger.error("a CPU engine of gated steps has no use for %s", type(body).__name__)

    def on_end(self, request_id: str, last_epoch: int) -> None:
        """It knows no requests."""

    def on_peer_end(self, request_id: str, last_epoch: int) -> None:
        """It keeps nothing for the GPU engine."""

    def plan(self, now: float) -> Batch | None:
        self.report_stats(now, 0, 0)
        run, self._next = self._next, None
        if run is None:
            return None
        self.steps += 1
        rows = tuple(_batch_row(row) for half in run.halves for row in half)
        return Batch(run.number, rows, second_half=len(run.halves[0]))

    def commit(self, batch: Batch, result: StepResult) -> None:
        """The tokens are the GPU engine's."""

    def fail(self, batch: Batch, error: Exception) -> None:
        """The GPU engine runs the rows again if they are to be."""
        logger.warning("the part of step %d was given up: %s", batch.number, error)

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        raise AssertionError("the CPU engine starts no copies")


def _batch_row(row: GatedRow) -> BatchRow:
    return BatchRow(
        request_id=row.request_id,
        tokens=[row.token],
        start=row.position,
        pages=row.pages,
        tier="host",
        sample=False,
        params=DecodeParams(),
        gated=True,
    )
