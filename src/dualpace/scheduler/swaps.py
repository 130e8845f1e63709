"""Copies under a scheduler that owns both tiers: rows that are swapped, prompts that land.

Holds the pages that they touch until they have ended. When to copy what is the scheduler's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dualpace.core.plan import CopyJob, CopyKind, Tier
from dualpace.kv.ledger import TransferLedger
from dualpace.kv.pages import BlockTable, PagePool, pages_for
from dualpace.scheduler.gated_rows import TierRow

logger = logging.getLogger(__name__)


class Swaps:
    """pools: of both tiers."""

    def __init__(self, pools: Mapping[Tier, PagePool], page_tokens: int) -> None:
        self._pools = pools
        self._page_tokens = page_tokens
        self._ledger = TransferLedger()
        self._new: list[CopyJob] = []
        self._tables: dict[int, tuple[BlockTable, BlockTable]] = {}  # of swaps, by job
        self._landing: dict[int, tuple[TierRow | None, BlockTable]] = {}

    def swap(self, row: TierRow, tier: Tier) -> bool:
        """Start to copy a row to the other tier; False, and nothing changes, if that has no room
        by now."""
        assert row.table is not None
        target = self._pools[tier].take(pages_for(row.num_tokens, self._page_tokens))
        if target is None:
            return False
        used = pages_for(row.computed, self._page_tokens)
        row.target = target
        kind: CopyKind = "store" if tier == "host" else "load"
        job = self._ledger.open(row.id, kind, row.table.pages[:used], target.pages[:used])
        self._pools[row.tier].hold(row.table)
        self._tables[job.number] = (row.table, target)
        self._new.append(job)
        return True

    def land(self, request_id: str, table: BlockTable, row: TierRow | None) -> None:
        """See that what a step has computed for these host pages arrives there, even if the row
        has ended."""
        job = self._ledger.open(request_id, "land", [], [])
        self._pools["host"].hold(table)
        self._landing[job.number] = (row, table)
        if row is not None:
            row.landing += 1
        self._new.append(job)

    def take(self) -> list[CopyJob]:
        """Copies to start now."""
        jobs, self._new = self._new, []
        return jobs

    def ended(self, job: CopyJob, row: TierRow | None, error: Exception | None) -> bool:
        """`row`, None if it has ended, goes on in its new tier, or if the copy failed where it is.
        False if it cannot: what should have landed is lost."""
        self._ledger.close(job)
        if error is not None:
            logger.error("%s of %s failed: %s", job.kind, job.request_id, error, exc_info=error)
        if job.kind == "land":
            return self._landed(job, row, error)
        source, target = self._tables.pop(job.number)
        new: Tier = "host" if job.kind == "store" else "gpu"
        old: Tier = "gpu" if new == "host" else "host"
        self._pools[old].drop(source)
        if row is None or error is not None:
            self._pools[new].drop(target)
            if row is not None:
                row.target = None
            return True
        self._pools[old].drop(source)
        row.tier, row.table, row.target = new, target, None
        return True

    def check_integrity(self) -> None:
        self._ledger.check_integrity()

    def _landed(self, job: CopyJob, row: TierRow | None, error: Exception | None) -> bool:
        landing, table = self._landing.pop(job.number)
        self._pools["host"].drop(table)
        if landing is None:
            return True
        landing.landing -= 1
        return error is None or row is not landing or row.table is not table
