"""Chunked prefill: how many positions of which prompt the next step computes."""

from __future__ import annotations

from collections.abc import Iterable

from dualpace.policy.view import GpuView, RowView


def prefill_budget(view: GpuView, decoding: int) -> int:
    """Positions left for prompts beside `decoding` decode rows.

    Never less than a page: prompts make progress however many rows decode.
    """
    return max(view.page_tokens, view.max_tokens - decoding)


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
