"""Simulated hardware from a profile: how long steps, copies and messages take.

Translates between batches and the cost model's questions; schedules nothing.
"""

from __future__ import annotations

from dualpace.core.errors import ConfigError
from dualpace.core.plan import Batch, CopyJob
from dualpace.policy.cost_model import CostModel, Estimate
from dualpace.sim.world import Hardware

MESSAGE_DELAY = 50e-6  # seconds from send to receipt between two processes, over ZeroMQ ipc


class Durations:
    """Step and copy times by a cost model, counting the steps whose time is an extrapolation.

    page_bytes: of one KV page; copy_bandwidth: bytes per second between the tiers.
    """

    def __init__(self, costs: CostModel, page_bytes: int, copy_bandwidth: float) -> None:
        if not copy_bandwidth > 0.0:
            raise ConfigError(f"the copy bandwidth must be positive, got {copy_bandwidth:g} B/s")
        self._costs = costs
        self._page_bytes = page_bytes
        self._copy_bandwidth = copy_bandwidth
        self.steps = 0
        self.extrapolated = 0

    def hardware(self, gpu_pages: int, host_pages: int, page_tokens: int) -> Hardware:
        """A machine with these durations and so many pages."""
        return Hardware(
            gpu_pages=gpu_pages,
            host_pages=host_pages,
            gpu_step=self.gpu_step,
            cpu_step=self.cpu_step,
            copy=self.copy,
            delay=lambda sender, to: 0.0 if sender == to else MESSAGE_DELAY,
            page_tokens=page_tokens,
        )

    def gpu_step(self, batch: Batch) -> float:
        """The decodes' part and each prompt chunk's part, one after the other."""
        parts = []
        rows = context = 0
        for row in batch.rows:
            if len(row.tokens) == 1 and row.start and row.tier == "gpu":
                rows += 1
                context += row.end
            else:
                parts.append(self._costs.gpu_prefill(len(row.tokens), row.start))
        if rows:
            parts.append(self._costs.gpu_decode(rows, context))
        return self._count(parts)

    def cpu_step(self, batch: Batch) -> float:
        context = sum(row.end for row in batch.rows)
        return self._count([self._costs.cpu_iteration(len(batch.rows), context)])

    def copy(self, job: CopyJob) -> float:
        return len(job.source) * self._page_bytes / self._copy_bandwidth

    def _count(self, parts: list[Estimate]) -> float:
        self.steps += 1
        self.extrapolated += any(part.extrapolated for part in parts)
        return sum(part.seconds for part in parts)
