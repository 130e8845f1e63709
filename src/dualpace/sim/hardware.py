"""Simulated hardware from a profile: how long steps, copies and messages take.

Translates between batches and the cost model's questions; schedules nothing.
"""

from __future__ import annotations

import math

from dualpace.core.errors import ConfigError
from dualpace.core.plan import Batch, BatchRow, CopyJob
from dualpace.policy.cost_model import (
    CostModel,
    cpu_step,
    earlier_context,
    gpu_step,
    stolen,
    stolen_share,
)
from dualpace.policy.surface import Estimate
from dualpace.sim.world import Hardware

RECENT_SECONDS = 0.5  # about an iteration: what of the GPU's past tells what it will run beside
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
        self._prefill_share = 0.0  # of the GPU's time, of late
        self._owed = 0.0  # GPU seconds that the CPU iteration under way still takes
        self._stolen_shares = (0.0, 0.0)  # of a decode's and of a prompt's time, while it does
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
        """What its decodes and prompt chunks take together, and what assists take from it."""
        if batch.second_half is not None:
            return self._gated_step(
                batch.rows[: batch.second_half], batch.rows[batch.second_half :]
            )
        rows = context = 0
        chunks = []
        for row in batch.rows:
            if len(row.tokens) == 1 and row.start and row.tier == "gpu":
                rows += 1
                context += row.end
            else:
                chunks.append((len(row.tokens), row.start))
        step = gpu_step(self._costs, rows, context, chunks)
        seconds = self._count(step)
        decodes = self._costs.gpu_decode(rows, context).seconds if rows else 0.0
        share = max(0.0, 1.0 - decodes / seconds)
        kept = math.exp(-seconds / RECENT_SECONDS)
        self._prefill_share = kept * self._prefill_share + (1.0 - kept) * share
        of_decodes, of_prompts = self._stolen_shares
        taken = of_decodes + share * (of_prompts - of_decodes)
        delay = min(self._owed, seconds * taken / (1.0 - taken))
        self._owed -= delay
        return seconds + delay

    def _gated_step(self, *halves: tuple[BatchRow, ...]) -> float:
        """While the GPU computes the dense layers of one half, both attend for the other one."""
        costs = self._costs
        dense, attention = [], []
        for rows in halves:
            prompts = [row for row in rows if _of_prompt(row)]
            decodes = [row for row in rows if not _of_prompt(row)]
            on_gpu = [row.end for row in decodes if row.tier == "gpu"]
            on_host = [row.end for row in decodes if row.tier == "host"]
            tokens = sum(len(row.tokens) for row in rows)
            one_pass = costs.gpu_prefill if prompts else costs.gpu_decode
            earlier = earlier_context(costs, [(len(row.tokens), row.start) for row in prompts])
            dense.append(one_pass(tokens, 0).seconds + earlier.seconds if tokens else 0.0)
            gpu = gpu_step(costs, len(on_gpu), sum(on_gpu), ()).seconds
            gpu -= gpu_step(costs, len(on_gpu), 0, ()).seconds
            host = costs.cpu_attention(len(on_host), sum(on_host)).seconds if on_host else 0.0
            attention.append((gpu, host))
        seconds = 0.0
        for other, (gpu, host) in zip(reversed(dense), attention, strict=True):
            seconds += max(other + gpu, host)
        return self._count(Estimate(seconds, False))

    def cpu_step(self, batch: Batch) -> float:
        """By the batch's route; what it steals from the GPU delays the GPU's next steps, by the
        part of either kind of work that it takes, until it has all of it."""
        rows, context = len(batch.rows), sum(row.end for row in batch.rows)
        seconds = self._count(
            cpu_step(self._costs, batch.route, rows, context, self._prefill_share)
        )
        self._owed = stolen(self._costs, batch.route, rows, context, self._prefill_share)
        self._stolen_shares = (
            stolen_share(self._costs, batch.route, rows, context, 0.0),
            stolen_share(self._costs, batch.route, rows, context, 1.0),
        )
        return seconds

    def copy(self, job: CopyJob) -> float:
        return len(job.source) * self._page_bytes / self._copy_bandwidth

    def _count(self, step: Estimate) -> float:
        self.steps += 1
        self.extrapolated += step.extrapolated
        return step.seconds


def _of_prompt(row: BatchRow) -> bool:
    """True unless the row is a decode, or looks just like one: a prompt's last token by itself."""
    return len(row.tokens) > 1 or not row.start
