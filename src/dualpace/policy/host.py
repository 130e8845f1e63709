"""What the host can take on: the largest CPU batch under its ITL target, and by which route.

Predicts and compares, from a cost model; knows neither pages nor arrival order. Without a cost
model there is a conservative stand-in, `unmeasured_costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from dualpace.core.plan import Route
from dualpace.policy.cost_model import (
    CostModel,
    Operation,
    Point,
    TableCostModel,
    cpu_step,
    stolen,
    stolen_share,
)

HYSTERESIS = 1.1  # another route must gain this much more before the CPU engine changes to it
# The default ITL target: where the host gains this share of the most it could gain…
ENOUGH = 0.95
# …within what a reader feels: no need to hurry beyond five tokens a second, nor sense in one a
# second or less.
FASTEST_TARGET, SLOWEST_TARGET = 0.2, 1.0
# Rows are admitted up to this share of the target, because they grow: those that the target has no
# room for wait a turn, which doubles their ITL.
ADMITTED = 0.9
TYPICAL_CONTEXT = 1024  # tokens of a request, to judge a batch that is not there yet
SAFE_BANDWIDTH = 40e9  # bytes per second, of a host's memory
SAFE_GPU_BANDWIDTH = 300e9  # of a GPU's
LEAST_GAIN = 0.01  # of the GPU's own rate; a host that adds less is left alone


class Choice(NamedTuple):
    """The next CPU iteration: its first `rows` candidates by `route`."""

    rows: int
    route: Route


@dataclass(frozen=True)
class HostRules:
    """routes: those that the CPU engine can run; cpu_itl_target: seconds an iteration may take.

    Of its questions, `rows` and `context` are a CPU batch's and the tokens that it attends to in
    total; `prefill_share` is the part of their time that the GPU's steps beside spend on prompts.
    """

    costs: CostModel
    cpu_itl_target: float
    routes: tuple[Route, ...] = ("local",)

    def seconds(self, route: Route, rows: int, context: int, prefill_share: float) -> float:
        """Of a CPU iteration by `route`."""
        return cpu_step(self.costs, route, rows, context, prefill_share).seconds

    def gain(
        self, route: Route, rows: int, context: int, token_rate: float, prefill_share: float
    ) -> tuple[float, float]:
        """Tokens a second that iterations by `route` add, and seconds of one.

        One that steals G seconds of a GPU which makes v (`token_rate`) tokens in a second is worth
        M - G·v of its M tokens.
        """
        seconds = max(self.seconds(route, rows, context, prefill_share), 1e-9)
        taken = stolen(self.costs, route, rows, context, prefill_share)
        return (rows - taken * token_rate) / seconds, seconds

    def quickest(self, rows: int, context: int, prefill_share: float = 0.0) -> float:
        """Seconds of a CPU iteration by the route that takes the fewest."""
        return min(self.seconds(route, rows, context, prefill_share) for route in self.routes)

    def share_stolen(self, rows: int, context: int, prefill_share: float) -> float:
        """The part of the GPU's time that CPU iterations take, one after the other, by the route
        that takes the fewest seconds; 0 without rows."""
        if not rows:
            return 0.0
        route = min(
            self.routes, key=lambda route: self.seconds(route, rows, context, prefill_share)
        )
        return stolen_share(self.costs, route, rows, context, prefill_share)

    def admits(self, rows: int, context: int, prefill_share: float) -> bool:
        """True if such a batch, with one that is new among them, will stay within the target."""
        return self.quickest(rows, context, prefill_share) <= ADMITTED * self.cpu_itl_target

    def choose(
        self, contexts: Sequence[int], token_rate: float, prefill_share: float, current: Route
    ) -> Choice:
        """The largest batch under the target of the route that gains most.

        contexts: tokens of the candidates, at least one, in the order in which they are served.
        A lone row runs however long it takes.
        """
        totals = list(accumulate(contexts))
        choices: dict[Route, tuple[float, int]] = {}
        for route in self.routes:
            rows = self._largest(route, totals, prefill_share)
            gain, _ = self.gain(route, rows, totals[rows - 1], token_rate, prefill_share)
            choices[route] = (gain, rows)
        best = max(choices, key=lambda route: choices[route][0])
        if current in choices and choices[best][0] <= choices[current][0] * HYSTERESIS:
            best = current
        return Choice(choices[best][1], best)

    def _largest(self, route: Route, totals: Sequence[int], prefill_share: float) -> int:
        """How many of the first candidates fit the target; at least one."""
        low, high = 1, len(totals)
        while low < high:
            middle = (low + high + 1) // 2
            seconds = self.seconds(route, middle, totals[middle - 1], prefill_share)
            if seconds <= self.cpu_itl_target:
                low = middle
            else:
                high = middle - 1
        return low


def unmeasured_costs(weight_bytes: int, token_bytes: int) -> TableCostModel:
    """What a CPU iteration takes by a guess on the safe side, for when nothing was measured: all
    weights are read, and the KV of every token, at bandwidths that any server reaches.

    weight_bytes: of the model; token_bytes: KV of one token. Knows nothing of the GPU's own steps.
    """
    points = []
    for rows in (1, 2):
        dense = weight_bytes / SAFE_GPU_BANDWIDTH
        points += [Point("assist", rows, 0, dense), Point("assist_stolen", rows, 0, dense)]
        for context in (0, 1 << 20):
            attention, local = context * token_bytes, weight_bytes + context * token_bytes
            points += [
                Point("cpu_attention", rows, context, attention / SAFE_BANDWIDTH),
                Point("cpu_iteration", rows, context, local / SAFE_BANDWIDTH),
            ]
    return TableCostModel(points)


def runnable(costs: CostModel, routes: Sequence[Route]) -> tuple[Route, ...]:
    """Those of `routes` that `costs` can judge."""
    needs: dict[Route, tuple[Operation, ...]] = {
        "local": ("cpu_iteration",),
        "assist": ("cpu_attention", "assist", "assist_stolen"),
        "assist2": ("cpu_attention", "assist", "assist_stolen"),
    }
    return tuple(route for route in routes if costs.covers(*needs[route]))


def default_itl_target(
    costs: CostModel, routes: Sequence[Route], max_rows: int, gpu_tokens: int | None
) -> float:
    """Seconds, up to which the smallest batch that gains nearly all that it can is admitted.

    gpu_tokens: KV room of the GPU, None if it is not known yet.
    """
    rules = HostRules(costs, SLOWEST_TARGET, tuple(routes))
    token_rate = gpu_token_rate(costs, gpu_tokens or 0, max_rows)
    gains, times = [], []
    for eighths in range(1, 9):
        rows = max(1, max_rows * eighths // 8)
        gain, seconds = max(
            rules.gain(route, rows, rows * TYPICAL_CONTEXT, token_rate, 0.0)
            for route in rules.routes
        )
        gains.append(gain)
        times.append(seconds)
    most = max(gains)  # below zero where every assist takes more from the GPU than it adds
    least = min(ENOUGH * most, most)
    enough = next(t for t, gain in zip(times, gains, strict=True) if gain >= least)
    return min(max(enough / ADMITTED, FASTEST_TARGET), SLOWEST_TARGET)


def gpu_token_rate(
    costs: CostModel, gpu_tokens: int, max_rows: int, context: int = TYPICAL_CONTEXT
) -> float:
    """Tokens a second that the GPU makes of full seats, by requests of `context` tokens each; 0 if
    that cannot be told."""
    seats = min(gpu_tokens // context, max_rows)
    if not seats or not costs.covers("gpu_decode"):
        return 0.0
    return seats / costs.gpu_decode(seats, seats * context).seconds


def why_no_help(
    rules: HostRules, host_tokens: int, gpu_tokens: int | None, max_rows: int
) -> str | None:
    """Why the host would add nothing worth having, or None if it does.

    host_tokens, gpu_tokens: KV room; the latter None if it is not known yet.
    """
    room = min(max_rows, host_tokens // TYPICAL_CONTEXT)
    if room < 1:
        return f"its KV room of {host_tokens} tokens holds no request of {TYPICAL_CONTEXT}"
    seconds = rules.quickest(1, TYPICAL_CONTEXT)
    if seconds > rules.cpu_itl_target:
        return (
            f"a single request would take {seconds:.2f} s a token there, more than the "
            f"{rules.cpu_itl_target:.2f} s of --cpu-itl-target"
        )
    gpu_rate = gpu_token_rate(rules.costs, gpu_tokens or 0, max_rows)
    rows, route = rules.choose([TYPICAL_CONTEXT] * room, gpu_rate, 0.0, rules.routes[0])
    gain, _ = rules.gain(route, rows, rows * TYPICAL_CONTEXT, gpu_rate, 0.0)
    if gain < LEAST_GAIN * gpu_rate:
        return f"it would add {max(gain, 0.0):.1f} tokens a second to the GPU's {gpu_rate:.0f}"
    return None
