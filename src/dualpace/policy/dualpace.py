"""Seats in arrival order, and the host as a waiting room in which requests keep decoding.

A GPU seat goes to the oldest request that does not have one, be it decoding on the host or not
prefilled yet; whoever finds no seat is prefilled into host pages and decoded by the CPU engine.
When the GPU runs short of pages its youngest request moves to the host. Given a cost model, the
host takes no more than it can decode within its ITL target, rotates where that is exceeded all
the same, and chooses who does its dense work; prompts leave GPU rows theirs.
"""

from __future__ import annotations

import heapq
from operator import attrgetter

from dualpace.core.plan import Route
from dualpace.kv.pages import pages_for
from dualpace.policy.chunks import paced_budget, prefill_budget, prefill_chunks
from dualpace.policy.cost_model import GpuSteps
from dualpace.policy.host import HostRules
from dualpace.policy.view import (
    CpuDecision,
    CpuView,
    GpuDecision,
    GpuView,
    RowView,
    short_of_pages,
)

# A row that will need its next page within so many tokens counts as needing it now, so that room
# is made before the row has to sit out.
GROWTH_LEAD = 4
# By default a step may take this much longer for assists before its prompts get a smaller chunk:
# kernels work through whole tiles, so that a little less of a prompt costs what all of it does.
TOLERATED = 1.1
# However much assists take, steps keep this part of their tokens: those wait whose prompts it is.
LEAST_STEP = 0.5


class DualPacePolicy:
    """The product's policy.

    max_host_rows: bounds the requests of the CPU engine; host: bounds them by time as well, if
    given; gpu_itl_target: seconds that a GPU step with decodes may take; by default, what the
    fullest one takes without assists: where these take more than `TOLERATED` allows, they cost
    prompts, not rows, as long as these keep `LEAST_STEP` of a step. With a target of their own
    they keep a page.
    """

    uses_host = True

    def __init__(
        self,
        max_host_rows: int,
        host: HostRules | None = None,
        gpu_itl_target: float | None = None,
    ) -> None:
        self.max_host_rows = max_host_rows
        self.host = host
        self.gpu_itl_target = gpu_itl_target

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        demote, preempt = self._relieve(view)
        leaving = {*demote, *preempt}
        decoding = [row for row in view.decoding if row.id not in leaving]
        budget = self._budget(view, decoding)
        unclaimed = budget - sum(row.remaining for row in view.prefilling)

        promote: list[str] = []
        admit: list[str] = []
        free = view.pages_free
        residents = len(decoding) + sum(row.tier == "gpu" for row in view.prefilling) + view.moving
        decoding_on_host = {row.id for row in view.host}
        candidates = heapq.merge(view.host, view.waiting, key=attrgetter("arrival"))
        admitted: list[RowView] = []
        for row in candidates if not leaving else ():
            pages = pages_for(row.tokens + 1, view.page_tokens)
            if pages > view.pages_total:
                continue  # it could never sit
            if residents >= view.max_rows or free - pages < residents:
                break  # the seat waits for the oldest; a younger one does not overtake it
            if row.id in decoding_on_host:
                promote.append(row.id)
            else:
                if unclaimed <= 0:
                    break
                unclaimed -= row.remaining
                admit.append(row.id)
                admitted.append(row)
            free -= pages
            residents += 1

        reserve = self._reserve(view, taken=set(admit), unclaimed=unclaimed)
        prefill = prefill_chunks((*view.prefilling, *admitted), budget, view.page_tokens)
        token_rate, prefill_share, seconds = self._load(view, decoding, prefill)
        if sum(tokens for _, tokens in prefill) <= budget - view.page_tokens:
            seconds = 0.0  # no limit of ours made it as long as it is
        return GpuDecision(
            admit=tuple(admit),
            reserve=reserve,
            promote=tuple(promote),
            demote=demote,
            preempt=preempt,
            prefill=prefill,
            token_rate=token_rate,
            prefill_share=prefill_share,
            seconds=seconds,
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        """Rows take turns, who has waited for the most iterations first, and the oldest among
        equals: so all of them run wherever all fit."""
        rows = list(view.rows)
        turn, route = self._turn(rows, view)
        free = view.pages_free
        send_back = []
        while len(rows) > 1 and short_of_pages(turn, view.page_tokens) > free:
            victim = rows.pop()
            free += victim.pages
            send_back.append(victim.id)
            turn, route = self._turn(rows, view)
        return CpuDecision(
            run=tuple(row.id for row in turn), send_back=tuple(send_back), route=route
        )

    def _turn(self, rows: list[RowView], view: CpuView) -> tuple[list[RowView], Route]:
        """Those of `rows` that the next iteration takes, and its route."""
        turn = sorted(rows, key=lambda row: (row.last_step, row.arrival))[: view.max_rows]
        if self.host is None or not turn:
            return turn, "local"
        count, route = self.host.choose(
            [row.tokens for row in turn], view.token_rate, view.prefill_share, view.route
        )
        return turn[:count], route

    def _left_by_assists(self, view: GpuView, prefill_share: float) -> float:
        """The part of its time that assists leave to a step of prompts (1), or of none (0)."""
        if self.host is None:
            return 1.0
        return 1.0 - self.host.share_stolen(view.host_rows, view.host_context, prefill_share)

    def _budget(self, view: GpuView, decoding: list[RowView]) -> int:
        """Positions for prompts in the next step."""
        budget = prefill_budget(view, len(decoding))
        if self.host is None or not decoding or not (view.prefilling or view.waiting):
            return budget
        left = self._left_by_assists(view, 1.0)
        if left < 1.0:
            # The last steps tell whether a prompt loses more beside assists than was measured.
            left /= view.overrun
        if self.gpu_itl_target is not None:
            return paced_budget(view, decoding, budget, self.host.costs, self.gpu_itl_target, left)
        if left * TOLERATED >= 1.0:
            return budget
        paced = paced_budget(view, decoding, budget, self.host.costs, None, left)
        return max(paced, int(LEAST_STEP * (len(decoding) + budget)) - len(decoding))

    def _load(
        self, view: GpuView, decoding: list[RowView], prefill: tuple[tuple[str, int], ...]
    ) -> tuple[float, float, float]:
        """Tokens that one more second of the GPU would yield, the prompts' share of its step, and
        seconds of that beside assists if there are any prompts; zeros where there is no telling.

        Prompts are the GPU's whatever the host does, so that a second is worth what its decodes
        make of one, also while prompts keep it busy: N requests of p prefill seconds and d decode
        seconds each end in T = N·p + (N - H)·d if the host decodes H, and dH/dT = 1/d. A GPU
        that decodes nothing yields first tokens.
        """
        costs = None if self.host is None else self.host.costs
        if costs is None or not costs.covers("gpu_decode", "gpu_prefill"):
            return 0.0, 0.0, 0.0
        counts = dict(prefill)
        prompts = [row for row in (*view.prefilling, *view.waiting) if row.id in counts]
        chunks = [(counts[row.id], row.computed) for row in prompts]
        rows, context = len(decoding), sum(row.tokens for row in decoding)
        steps = GpuSteps(costs, rows, context)
        alone = steps.beside(chunks).seconds
        decodes = steps.decodes.seconds
        if not alone:
            return 0.0, 0.0, 0.0
        share = max(0.0, 1.0 - decodes / alone)
        seconds = 0.0
        if prompts:
            seconds += alone * share / self._left_by_assists(view, 1.0)
            seconds += alone * (1.0 - share) / self._left_by_assists(view, 0.0)
        if rows:
            return rows / decodes, share, seconds
        first_tokens = sum(counts[row.id] == row.remaining for row in prompts)
        return first_tokens / alone, share, seconds

    def _relieve(self, view: GpuView) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Youngest rows to leave, until the others can grow: to demote where the host can take
        them, else to preempt."""
        rows = list(view.decoding)
        free = view.pages_free + view.demoting_pages
        leaving = []
        while rows and short_of_pages(rows, view.page_tokens, GROWTH_LEAD) > free:
            if len(rows) == 1 and short_of_pages(rows, view.page_tokens) <= free:
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

    def _reserve(self, view: GpuView, taken: set[str], unclaimed: int) -> tuple[str, ...]:
        """Waiting rows to place on the host, as many as the next steps can prefill."""
        reserve = []
        free = view.host_pages_free
        rows = view.host_rows
        context = view.host_context
        for row in view.waiting:
            if not view.host_open or rows >= self.max_host_rows or unclaimed <= 0:
                break
            if row.id in taken:
                continue
            # An idle host takes one request however slow it is: a prompt may fit nowhere else.
            if self.host and rows:
                more = (rows + 1, context + row.tokens)
                if not self.host.admits(*more, view.prefill_share):
                    break
            pages = pages_for(row.tokens + 1, view.page_tokens)
            if pages > view.host_pages_total:
                continue
            if free - pages < rows:
                break
            free -= pages
            rows += 1
            context += row.tokens
            unclaimed -= row.remaining
            reserve.append(row.id)
        return tuple(reserve)
