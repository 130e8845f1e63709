"""NEO's published scheduling: host rows advance only inside GPU steps that cover their attention.

Source: Jiang et al., "NEO: Saving GPU Memory Crisis with CPU Offloading for Online LLM Inference",
MLSys 2025, and its published scheduler. The base line for decoupled scheduling; for a scheduler
that owns both tiers. Whole prompts, strict arrival order; two sub-batches take turns, the CPU
attending for one while the GPU works on the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpace.kv.pages import pages_for
from dualpace.policy.cost_model import CostModel, Operation
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView, RowView

LAUNCH = 0.8e-3  # seconds that NEO counts for the launch of CPU attention, in each layer
SWAP_IN_BELOW = 0.95  # of the GPU's pages
GATED_OPERATIONS: tuple[Operation, ...] = ("gpu_decode", "gpu_prefill", "cpu_attention")
SATURATED = 128  # tokens from which on the dense layers take longer for more of them


class SubBatch:
    """Rows that go through a layer together, and the seconds that it takes, of all layers.

    launch: seconds of all launches of CPU attention.
    """

    def __init__(self, costs: CostModel, launch: float) -> None:
        self._costs = costs
        self._launch = launch
        self.prompts: list[RowView] = []
        self.gpu_rows: list[RowView] = []
        self.host_rows: list[RowView] = []

    @property
    def rows(self) -> int:
        """Tokens that it yields."""
        return len(self.prompts) + len(self.gpu_rows) + len(self.host_rows)

    @property
    def tokens(self) -> int:
        """Positions that go through the dense layers."""
        decodes = len(self.gpu_rows) + len(self.host_rows)
        return decodes + sum(row.remaining for row in self.prompts)

    @property
    def dense(self) -> float:
        """The dense layers; with the prompts' attention, which is measured with them."""
        if not self.tokens:
            return 0.0
        if self.prompts:
            return self._costs.gpu_prefill(self.tokens, 0).seconds
        return self._costs.gpu_decode(self.tokens, 0).seconds

    @property
    def attention(self) -> float:
        """Of the GPU's decodes."""
        rows, context = len(self.gpu_rows), sum(row.tokens for row in self.gpu_rows)
        if not rows:
            return 0.0
        least = self._costs.gpu_decode(rows, 0).seconds
        return self._costs.gpu_decode(rows, context).seconds - least

    @property
    def gpu_time(self) -> float:
        return self.dense + self.attention

    @property
    def cpu_time(self) -> float:
        """Attention of the host's decodes, and the launch, which is counted even for none."""
        rows, context = len(self.host_rows), sum(row.tokens for row in self.host_rows)
        attention = self._costs.cpu_attention(rows, context).seconds if rows else 0.0
        return attention + self._launch


@dataclass
class Plan:
    """Which prompts and rows a step shall have; `host_prompts` are those that go to the host."""

    gpu_prompts: list[RowView] = field(default_factory=list)
    host_prompts: list[RowView] = field(default_factory=list)
    gpu_rows: list[RowView] = field(default_factory=list)
    host_rows: list[RowView] = field(default_factory=list)
    tokens_left: int = 0


class GatedPolicy:
    """layers: of the model; launch: seconds counted in each of them."""

    uses_host = True

    def __init__(self, costs: CostModel, layers: int, launch: float = LAUNCH) -> None:
        self._costs = costs
        self._launch = launch * layers

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        """`view.host`: all host rows that can decode. What is reserved is admitted to the host."""
        out, into = self._swaps(view)
        moved = {row.id for row in (*out, *into)}
        plan = self._admit(view, [row for row in view.decoding if row not in out], into)
        plan.gpu_rows = [row for row in view.decoding if row.id not in moved]
        if view.host_open:
            plan.host_rows = [row for row in view.host if row.id not in moved]
        batches = self.batches(plan)
        prompts = {row.id for batch in batches for row in batch.prompts}
        gate = tuple(tuple(row.id for row in batch.host_rows) for batch in batches)
        return GpuDecision(
            admit=tuple(row.id for row in plan.gpu_prompts if row.id in prompts),
            reserve=tuple(row.id for row in plan.host_prompts if row.id in prompts),
            promote=tuple(row.id for row in into),
            demote=tuple(row.id for row in out),
            prefill=tuple(
                (row.id, row.remaining)
                for row in (*view.prefilling, *plan.gpu_prompts, *plan.host_prompts)
                if row in view.prefilling or row.id in prompts
            ),
            gate=gate if len(gate) == 2 else ((), ()),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        return CpuDecision()

    def batches(self, plan: Plan) -> list[SubBatch]:
        """Two sub-batches, or one without host rows where the GPU alone makes more of its time."""
        first, second, alone = (SubBatch(self._costs, self._launch) for _ in range(3))
        for batch in (first, alone):
            batch.prompts = [*plan.gpu_prompts, *plan.host_prompts]
            batch.gpu_rows = list(plan.gpu_rows)
        if not first.rows:
            return [alone]
        while len(alone.prompts) > len(plan.gpu_prompts):
            last = alone.prompts.pop()
            if alone.tokens < SATURATED:
                alone.prompts.append(last)
                break
        self._open_gate(first, second, plan)
        if not second.rows:
            return [alone]
        while len(first.prompts) > len(plan.gpu_prompts):
            last = first.prompts.pop()
            if first.tokens < SATURATED or min(_uncovered(first, second)) < 0.0:
                first.prompts.append(last)
                break
        together = (first.rows + second.rows) / (first.gpu_time + second.gpu_time)
        return [first, second] if together > alone.rows / alone.gpu_time else [alone]

    def _open_gate(self, first: SubBatch, second: SubBatch, plan: Plan) -> None:
        """Host rows in arrival order, each to the half with more room; once one does not fit,
        none as long is tried."""
        batch, too_long, left = second, math.inf, plan.tokens_left
        for row in plan.host_rows:
            if left < 1:
                break
            if row.tokens >= too_long:
                continue
            batch.host_rows.append(row)
            room = _uncovered(first, second)
            if min(room) < 0.0:
                batch.host_rows.pop()
                too_long = row.tokens
                continue
            left -= 1
            batch = second if room[1] > room[0] else first

    def _swaps(self, view: GpuView) -> tuple[list[RowView], list[RowView]]:
        """Rows to swap out, the youngest first, or else host rows to swap in, the oldest first."""
        staying = list(view.decoding)
        needed = sum(_pages(row, view) for row in (*staying, *_on_gpu(view.prefilling)))
        needed += view.pages_moving
        out = []
        while staying and (needed > view.pages_total or len(staying) > view.max_rows):
            out.append(staying.pop())
            needed -= _pages(out[-1], view)
        into: list[RowView] = []
        for row in view.host if not out else ():
            needed += _pages(row, view)
            full = len(staying) + len(into) >= view.max_rows
            if full or needed > round(SWAP_IN_BELOW * view.pages_total):
                break
            into.append(row)
        return out, into

    def _admit(self, view: GpuView, staying: Sequence[RowView], into: Sequence[RowView]) -> Plan:
        """Waiting prompts: to the GPU while they fit, then all to the host."""
        plan = Plan(tokens_left=view.max_tokens - len(staying) - len(into))
        rows = view.max_rows - len(staying) - len(into) - len(view.prefilling)
        gpu = sum(_pages(row, view) for row in (*staying, *into, *_on_gpu(view.prefilling)))
        gpu += view.pages_moving
        host = view.host_pages_total - view.host_pages_free
        host_room = view.host_pages_total - view.pages_total  # what the GPU holds must fit, too
        through_gpu = 0
        for row in view.waiting:
            pages = _pages(row, view)
            alone = not (plan.gpu_prompts or plan.host_prompts)
            if rows < 1 or (row.remaining > plan.tokens_left and not alone):
                break
            if not plan.host_prompts and gpu + pages <= view.pages_total:
                gpu += pages
                plan.gpu_prompts.append(row)
            elif (
                view.host_open
                and through_gpu + pages <= view.pages_total
                and host + pages <= host_room
            ):
                host += pages
                through_gpu += pages
                plan.host_prompts.append(row)
            else:
                break
            rows -= 1
            plan.tokens_left -= row.remaining
        return plan


def longest_request(gpu_pages: int, page_tokens: int) -> int:
    """Tokens of the longest request: each must be able to come back to the GPU."""
    return max(0, round(SWAP_IN_BELOW * gpu_pages) - 1) * page_tokens


def _uncovered(first: SubBatch, second: SubBatch) -> tuple[float, float]:
    """For each half what is left of the GPU time that covers its CPU attention, seconds: the other
    half's dense layers, and the attention of its own GPU rows."""
    return (
        second.dense + first.attention - first.cpu_time,
        first.dense + second.attention - second.cpu_time,
    )


def _pages(row: RowView, view: GpuView) -> int:
    return pages_for(row.tokens, view.page_tokens)


def _on_gpu(rows: Sequence[RowView]) -> list[RowView]:
    return [row for row in rows if row.tier == "gpu"]
