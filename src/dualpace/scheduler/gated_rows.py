"""A request on the books of the scheduler that owns both tiers."""

from __future__ import annotations

from dataclasses import dataclass

from dualpace.kv.pages import BlockTable
from dualpace.scheduler.planned_row import PlannedRow


@dataclass(eq=False)
class TierRow(PlannedRow):
    """table: its pages in `tier`; target: pages in the other tier that it is being copied to;
    landing: copies under way that bring what steps have computed for its host pages there."""

    target: BlockTable | None = None
    landing: int = 0

    @property
    def decodes(self) -> bool:
        return self.table is not None and self.computed == self.num_tokens - 1

    @property
    def ready(self) -> bool:
        """True if there is something left to do for it, and its KV is where a step needs it, or
        will be when those under way have ended."""
        arriving = self.landing or (self.steps and self.tier == "host")
        return self.target is None and not self.at_length and not (arriving and self.decodes)
