"""What the host takes on: batches under the target, fair turns, routes by what they gain."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from dualpace.core.plan import Route
from dualpace.policy.chunks import paced_budget
from dualpace.policy.cost_model import Point, TableCostModel, cpu_step, gpu_step
from dualpace.policy.dualpace import LEAST_STEP, DualPacePolicy
from dualpace.policy.host import (
    ADMITTED,
    HYSTERESIS,
    HostRules,
    default_itl_target,
    runnable,
    unmeasured_costs,
    why_no_help,
)
from dualpace.policy.view import CpuView, GpuView, RowView

PAGE = 16
SIZES = (1, 256)
CONTEXTS = (0, 1_000_000)


def table(tile: int | None = None, **operations: tuple[float, float, float]) -> TableCostModel:
    """Each operation as seconds: fixed + per row (or token) + per token of context."""
    points = (
        Point(name, size, context, fixed + per_size * size + per_token * context)
        for name, (fixed, per_size, per_token) in operations.items()
        for size in SIZES
        for context in (CONTEXTS if not name.startswith("assist") else (0,))
    )
    return TableCostModel(points, tile)


# A host that reads its weights in 0.1 s and 1 ms of KV a row; a GPU that needs 40 ms for a step.
PARAMETERS: dict[str, tuple[float, float, float]] = dict(
    cpu_iteration=(0.1, 0.0, 1e-6),
    cpu_attention=(0.0, 0.0, 1e-6),
    gpu_decode=(0.04, 0.0, 1e-8),
    gpu_prefill=(0.04, 1e-4, 1e-8),
    assist=(0.02, 0.0, 0.0),
    assist_beside_prefill=(0.08, 0.0, 0.0),
    assist_stolen=(0.01, 0.0, 0.0),
)
COSTS = table(**PARAMETERS)


def host_row(arrival: int, tokens: int, last_step: int = 0) -> RowView:
    pages = -(-tokens // PAGE) + 1
    return RowView(f"r{arrival}", arrival, tokens, tokens - 1, pages, "host", last_step)


def cpu_view(rows: list[RowView], **fields: object) -> CpuView:
    defaults = {"now": 0.0, "page_tokens": PAGE, "pages_free": 10**6, "max_rows": 256}
    return CpuView(**{**defaults, **fields}, rows=tuple(rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_never_exceeds_its_target_and_nobody_waits_for_longer_than_a_round(
    seed: int,
) -> None:
    rng = random.Random(seed)
    target = rng.uniform(0.12, 0.4)
    policy = DualPacePolicy(256, HostRules(COSTS, target, ("local", "assist", "assist2")))
    tokens = {i: rng.randint(100, 60_000) for i in range(rng.randint(1, 40))}
    last = dict.fromkeys(tokens, 0)
    route, waited = "local", Counter(dict.fromkeys(tokens, 0))
    for step in range(1, 200):
        share = rng.random()
        view = cpu_view(
            [host_row(i, tokens[i], last[i]) for i in tokens],
            route=route, token_rate=rng.choice([0.0, 300.0, 5000.0]), prefill_share=share,
        )  # fmt: skip
        decision = policy.plan_cpu(view)
        ran = [int(name[1:]) for name in decision.run]
        context = sum(tokens[i] for i in ran)
        seconds = cpu_step(COSTS, decision.route, len(ran), context, share).seconds
        assert ran
        assert seconds <= target or len(ran) == 1
        for i in tokens:
            waited[i] = 0 if i in ran else waited[i] + 1
            assert waited[i] < len(tokens)
        for i in ran:
            tokens[i] += 1
            last[i] = step
        route = decision.route


def test_all_rows_run_while_all_fit() -> None:
    policy = DualPacePolicy(256, HostRules(COSTS, 1.0))
    rows = [host_row(i, 1000, last_step=i % 3) for i in range(100)]
    assert {*policy.plan_cpu(cpu_view(rows)).run} == {row.id for row in rows}


def test_the_route_is_the_one_that_gains_most_for_each_stolen_second() -> None:
    """100 rows × 1,000 tokens: local takes 0.2 s, assist 0.12 s and 10 ms of the GPU, two halves
    2 × max(0.05, 0.02) = 0.1 s and 20 ms."""
    rules = HostRules(COSTS, 1.0, ("local", "assist", "assist2"))
    contexts = [1000] * 100

    def route(token_rate: float, prefill_share: float = 0.0) -> str:
        return rules.choose(contexts, token_rate, prefill_share, "assist2").route

    # 500 | (100 - 0.01 v) / 0.12 | (100 - 0.02 v) / 0.1
    assert route(0.0) == "assist2"
    assert route(2000.0) == "assist"  # 500, 667, 600
    assert route(5000.0) == "local"  # 500, 417, 0
    # Beside prompts alone an assist's dense work takes 0.08 s: 500, 556, 625 at no worth.
    assert route(0.0, 1.0) == "assist2"
    assert route(1500.0, 1.0) == "local"  # 500, 472, 437


def test_a_route_is_kept_unless_another_gains_clearly_more() -> None:
    rules = HostRules(COSTS, 1.0, ("local", "assist"))
    contexts = [1000] * 100
    even = (100 - 500 * 0.12) / 0.01  # the worth of a GPU second at which both gain 500 a second
    margin = (HYSTERESIS - 1) * 500 * 0.12 / 0.01
    for current in ("local", "assist"):
        for worth in (even - 0.9 * margin, even, even + 0.9 * margin / HYSTERESIS):
            assert rules.choose(contexts, worth, 0.0, current).route == current
    assert rules.choose(contexts, even - 1.1 * margin, 0.0, "local").route == "assist"
    assert rules.choose(contexts, even + 1.1 * margin, 0.0, "assist").route == "local"


def test_no_route_is_taken_that_the_engine_cannot_run_or_nobody_has_measured() -> None:
    unknown = table(cpu_iteration=(0.1, 0.0, 1e-6), cpu_attention=(0.0, 0.0, 1e-6))
    assert runnable(unknown, ("local", "assist")) == ("local",)
    assert runnable(COSTS, ("local",)) == ("local",)
    no_weights = table(cpu_attention=(0.0, 0.0, 1e-6), assist=(1, 0, 0), assist_stolen=(1, 0, 0))
    assert runnable(no_weights, ("local", "assist", "assist2")) == ("assist", "assist2")


def test_the_host_takes_no_more_requests_than_it_can_decode_in_time() -> None:
    """0.1 s for the weights and 1 ms for 1,000 tokens: 0.15 s are 50 such requests. By the GPU, 20
    or up to 80 ms instead of the weights'."""
    waiting = tuple(RowView(f"r{i}", i, 1000) for i in range(60))

    def reserved(rows: int, context: int, routes: tuple[Route, ...], prompts: float) -> int:
        view = GpuView(
            now=0.0, page_tokens=PAGE, pages_total=0, pages_free=0, max_rows=256,
            max_tokens=10**6, waiting=waiting, host_open=True, host_pages_total=10**6,
            host_pages_free=10**6, host_rows=rows, host_context=context, prefill_share=prompts,
        )  # fmt: skip
        rules = HostRules(COSTS, (0.15 + 1e-9) / ADMITTED, routes)
        return len(DualPacePolicy(256, rules).plan_gpu(view).reserve)

    assert reserved(0, 0, ("local",), 0.5) == 50
    assert reserved(20, 40_000, ("local",), 0.0) == 10
    assert reserved(50, 50_000, ("local",), 0.0) == 0
    assert reserved(90, 90_000, ("assist",), 0.0) == 40
    assert reserved(90, 90_000, ("assist",), 0.5) == 10


def test_prompts_leave_gpu_rows_their_target() -> None:
    """A step of n prompt tokens beside 10 decodes takes 40 ms + 0.1 ms for each of n + 10, or as
    many as fill the last tile."""
    decoding = [RowView(f"r{i}", i, 100, 99, 7) for i in range(10)]
    view = GpuView(
        now=0.0, page_tokens=PAGE, pages_total=100, pages_free=100, max_rows=64, max_tokens=1024,
        decoding=tuple(decoding), prefilling=(RowView("p", 99, 5000, 0, 90),),
    )  # fmt: skip
    paced = DualPacePolicy(64, HostRules(COSTS, 1.0), gpu_itl_target=0.08)
    assert paced.plan_gpu(view).prefill == (("p", 389),)
    assert DualPacePolicy(64, HostRules(COSTS, 1.0)).plan_gpu(view).prefill == (("p", 1014),)
    for costs, tile in ((COSTS, 1), (table(tile=64, **PARAMETERS), 64)):
        for target in (0.001, 0.05, 0.08, 0.13, 0.1444):
            budget = paced_budget(view, decoding, 1014, costs, target)
            step = gpu_step(costs, 10, 1000, [(budget, 0)]).seconds
            more = gpu_step(costs, 10, 1000, [(budget + 1, 0)]).seconds
            assert step <= target or budget == PAGE
            assert more > target or budget == 1014
            assert (10 + budget) % tile == 0 or budget == PAGE


def test_what_assists_take_beyond_a_little_costs_prompts_a_smaller_chunk() -> None:
    decoding = [RowView(f"r{i}", i, 100, 99, 7) for i in range(10)]
    view = GpuView(
        now=0.0, page_tokens=PAGE, pages_total=100, pages_free=100, max_rows=64, max_tokens=1024,
        decoding=tuple(decoding), prefilling=(RowView("p", 99, 5000, 0, 90),),
        host_rows=10, host_context=100_000,
    )  # fmt: skip

    def chunk(route: Route, taken: float, view: GpuView) -> int:
        """With assists that take `taken` seconds from prompts."""
        costs = table(**PARAMETERS, assist_stolen_beside_prefill=(taken, 0.0, 0.0))
        policy = DualPacePolicy(64, HostRules(costs, 1.0, (route,)))
        [(_, tokens)] = policy.plan_gpu(view).prefill
        return tokens

    full = gpu_step(COSTS, 10, 1000, [(1014, 0)]).seconds
    # Beside prompts an iteration has 0.1 s of attention and 0.08 s of assists.
    left = 1.0 - 0.03 / 0.18
    tokens = chunk("assist", 0.03, view)
    assert gpu_step(COSTS, 10, 1000, [(tokens, 0)]).seconds <= left * full
    assert gpu_step(COSTS, 10, 1000, [(tokens + 1, 0)]).seconds > left * full
    assert chunk("assist", 0.17, view) == LEAST_STEP * 1024 - 10
    assert chunk("local", 0.03, view) == 1014
    # 0.03 of 1.08 s are less than what steps tolerate, unless these show that it is more.
    view = msgspec.structs.replace(view, host_context=1_000_000)
    assert chunk("assist", 0.03, view) == 1014
    assert chunk("assist", 0.03, msgspec.structs.replace(view, overrun=1.2)) < 1014 / 1.15
    assert chunk("local", 0.03, msgspec.structs.replace(view, overrun=1.2)) == 1014


def test_the_default_target_is_where_a_larger_batch_gains_little() -> None:
    # 1 ms a row beside 0.1 s of weights: 256 rows make 719 a second, 95% of that takes 224 rows.
    filled = ADMITTED * default_itl_target(COSTS, ("local",), 256, None)
    assert filled == pytest.approx(0.1 + 224 * 1.024e-3)
    slow = table(cpu_iteration=(0.1, 0.0, 1e-4))
    fast = table(cpu_iteration=(1e-3, 0.0, 1e-9))
    assert default_itl_target(slow, ("local",), 256, None) == 1.0
    assert default_itl_target(fast, ("local",), 256, None) == 0.2
    thief = table(
        cpu_attention=(0.3, 0.0, 0.0), assist=(0.1, 0.0, 0.0), assist_stolen=(0.4, 1e-3, 0.0),
        gpu_decode=(0.02, 0.0, 0.0),
    )  # fmt: skip
    least = ADMITTED * default_itl_target(thief, ("assist",), 256, 10**6)
    assert least == pytest.approx(0.4)


def test_a_host_that_cannot_help_is_told_why() -> None:
    rules = HostRules(COSTS, 0.3)
    assert why_no_help(rules, 100_000, 12_800, 256) is None
    assert "holds no request" in (why_no_help(rules, 1000, 12_800, 256) or "")
    crawl = HostRules(table(cpu_iteration=(2.0, 0.0, 1e-6)), 0.3)
    assert "a token there" in (why_no_help(crawl, 100_000, 12_800, 256) or "")
    # One request at 10 a second beside 250 seats at 40 ms: nothing to win.
    one = HostRules(COSTS, 0.3)
    assert "tokens a second" in (why_no_help(one, 1024, 256_000, 256) or "")


def test_without_a_profile_the_host_is_taken_to_be_slow() -> None:
    costs = unmeasured_costs(weight_bytes=16 * 10**9, token_bytes=131072)
    assert costs.cpu_iteration(1, 0).seconds == pytest.approx(0.4)
    assert costs.cpu_iteration(64, 64 * 1024).seconds == pytest.approx(
        0.4 + 64 * 1024 * 131072 / 4e10
    )
    assert costs.assist(64, 0.5).seconds == pytest.approx(16e9 / 3e11)
    assert costs.cpu_attention(64, 65536).seconds == pytest.approx(65536 * 131072 / 4e10)
