"""Continuous batching on the GPU alone: first come, first served, recompute under pressure.

What vLLM does, and the base line for everything the host adds.
"""

from __future__ import annotations

from dualpace.kv.pages import pages_for
from dualpace.policy.chunks import prefill_budget, prefill_chunks
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView, short_of_pages


class GpuOnlyPolicy:
    """No host: a request waits, or runs on the GPU."""

    uses_host = False

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        decoding = list(view.decoding)
        free = view.pages_free
        preempt = []
        while short_of_pages(decoding, view.page_tokens) > free:
            victim = decoding.pop()
            free += victim.pages
            preempt.append(victim.id)
        free -= short_of_pages(decoding, view.page_tokens)

        budget = prefill_budget(view, len(decoding))
        prefilling = list(view.prefilling)
        admit = []
        seats = view.max_rows - len(decoding) - len(prefilling)
        unclaimed = budget - sum(row.remaining for row in prefilling)
        for row in view.waiting if not preempt else ():
            pages = pages_for(row.tokens + 1, view.page_tokens)
            if pages > view.pages_total:
                continue  # it must not hold up those that fit
            # Who is let into the last pages will soon be recomputed: each resident keeps one to
            # grow into. Alone, a request may have them all.
            growth = len(decoding) + len(prefilling)
            if pages + growth > free or seats <= 0 or unclaimed <= 0:
                break
            free -= pages
            seats -= 1
            unclaimed -= row.remaining
            admit.append(row.id)
            prefilling.append(row)
        return GpuDecision(
            admit=tuple(admit),
            preempt=tuple(preempt),
            prefill=prefill_chunks(prefilling, budget, view.page_tokens),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        return CpuDecision()
