"""Chunked prefill: how many positions of which prompt the next step computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualpace.policy.cost_model import CostModel, GpuSteps
from dualpace.policy.view import GpuView, RowView


def prefill_budget(view: GpuView, decoding: int) -> int:
    """Positions left for prompts beside `decoding` decode rows.

    Never less than a page: prompts make progress however many rows decode.
    """
    return max(view.page_tokens, view.max_tokens - decoding)


def paced_budget(
    view: GpuView,
    decoding: Sequence[RowView],
    budget: int,
    costs: CostModel,
    target: float | None,
    scale: float = 1.0,
) -> int:
    """The most of `budget` with which a step of the `decoding` rows stays under `target` seconds,
    by default those of a step with all of it that has the GPU to itself.

    scale: of that limit, less than 1 where assists take a part of the GPU's time. Taken as one
    chunk of the prompt that is first in line; never less than a page.
    """
    if not costs.covers("gpu_decode", "gpu_prefill"):
        return budget
    steps = GpuSteps(costs, len(decoding), sum(row.tokens for row in decoding))
    start = view.prefilling[0].computed if view.prefilling else 0

    def seconds(tokens: int) -> float:
        return steps.beside([(tokens, start)]).seconds

    full = seconds(budget)
    limit = (full if target is None else target) * scale
    if full <= limit:
        return budget
    low, high = 0, budget
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return max(low, view.page_tokens)


def prefill_chunks(
    rows: Iterable[RowView], budget: int, page_tokens: int
) -> tuple[tuple[str, int], ...]:
    """Share `budget` positions among `rows` in their order.

    A chunk into host pages ends on a page boundary unless it is the prompt's last, so that no page
    is stored twice.
    """
    chunks = []
    for row in rows:
        count = min(row.remaining, budget)
        if row.tier == "host" and count < row.remaining:
            count = (row.computed + count) // page_tokens * page_tokens - row.computed
        if count <= 0:
            break
        chunks.append((row.id, count))
        budget -= count
    return tuple(chunks)
