"""Seats in arrival order, and the host as a waiting room in which requests keep decoding.

A GPU seat goes to the oldest request that does not have one, be it decoding on the host or not
prefilled yet; whoever finds no seat is prefilled into host pages and decoded by the CPU engine.
When the GPU runs short of pages its youngest request moves to the host.
"""

from __future__ import annotations

from dualpace.kv.pages import pages_for
from dualpace.policy.chunks import prefill_budget, prefill_chunks
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView, RowView

# A row that will need its next page within so many tokens counts as needing it now, so that room
# is made before the row has to sit out.
GROWTH_LEAD = 4


class DualPacePolicy:
    """The product's policy. `max_host_rows` bounds the batch of the CPU engine."""

    uses_host = True

    def __init__(self, max_host_rows: int) -> None:
        self.max_host_rows = max_host_rows

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        demote, preempt = self._relieve(view)
        leaving = {*demote, *preempt}
        decoding = [row for row in view.decoding if row.id not in leaving]
        budget = prefill_budget(view, len(decoding))
        unclaimed = budget - sum(row.remaining for row in view.prefilling)

        promote: list[str] = []
        admit: list[str] = []
        free = view.pages_free
        residents = len(decoding) + sum(row.tier == "gpu" for row in view.prefilling) + view.moving
        waiting = {row.id for row in view.waiting}
        candidates = sorted(
            (row for row in (*view.host, *view.waiting) if self._could_sit(row, view)),
            key=lambda row: row.arrival,
        )
        admitted: list[RowView] = []
        for row in candidates if not leaving else ():
            pages = pages_for(row.tokens + 1, view.page_tokens)
            if residents >= view.max_rows or free - pages < residents:
                break  # the seat waits for the oldest; a younger one does not overtake it
            if row.id in waiting:
                if unclaimed <= 0:
                    break
                unclaimed -= row.remaining
                admit.append(row.id)
                admitted.append(row)
            else:
                promote.append(row.id)
            free -= pages
            residents += 1

        reserve = self._reserve(view, taken=set(admit), unclaimed=unclaimed)
        return GpuDecision(
            admit=tuple(admit),
            reserve=reserve,
            promote=tuple(promote),
            demote=demote,
            preempt=preempt,
            prefill=prefill_chunks((*view.prefilling, *admitted), budget, view.page_tokens),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        rows = list(view.rows)
        free = view.pages_free
        send_back = []
        while len(rows) > 1 and _short_of_pages(rows[: view.max_rows], view.page_tokens) > free:
            victim = rows.pop()
            free += victim.pages
            send_back.append(victim.id)
        return CpuDecision(
            run=tuple(row.id for row in rows[: view.max_rows]), send_back=tuple(send_back)
        )

    def _relieve(self, view: GpuView) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Youngest rows to leave, until the others can grow: to demote where the host can take
        them, else to preempt."""
        rows = list(view.decoding)
        free = view.pages_free + view.demoting_pages
        leaving = []
        while rows and _short_of_pages(rows, view.page_tokens, GROWTH_LEAD) > free:
            if len(rows) == 1 and _short_of_pages(rows, view.page_tokens) <= free:
                break  # alone, it may use the last page
            victim = rows.pop()
            free += victim.pages
            leaving.append(victim)
        fits = [
            view.host_open and pages_for(row.tokens + 1, view.page_tokens) <= view.host_pages_total
            for row in leaving
        ]
        return (
            tuple(row.id for row, fit in zip(leaving, fits, strict=True) if fit),
            tuple(row.id for row, fit in zip(leaving, fits, strict=True) if not fit),
        )

    def _could_sit(self, row: RowView, view: GpuView) -> bool:
        return pages_for(row.tokens + 1, view.page_tokens) <= view.pages_total

    def _reserve(self, view: GpuView, taken: set[str], unclaimed: int) -> tuple[str, ...]:
        """Waiting rows to place on the host, as many as the next steps can prefill."""
        reserve = []
        free = view.host_pages_free
        rows = view.host_rows
        for row in view.waiting:
            if not view.host_open or rows >= self.max_host_rows or unclaimed <= 0:
                break
            if row.id in taken:
                continue
            pages = pages_for(row.tokens + 1, view.page_tokens)
            if pages > view.host_pages_total:
                continue
            if free - pages < rows:
                break
            free -= pages
            rows += 1
            unclaimed -= row.remaining
            reserve.append(row.id)
        return tuple(reserve)


def _short_of_pages(rows: list[RowView], page_tokens: int, lead: int = 1) -> int:
    """Rows whose pages do not cover the next `lead` positions."""
    return sum(row.computed + lead > row.pages * page_tokens for row in rows)
