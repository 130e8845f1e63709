"""NEO's rules against an example worked out by hand, in milliseconds.

A decode pass takes 10 through the dense layers, a pass with n prompt tokens 10 + 0.1 n; attention
takes 0.01 for a token of context on the GPU and 0.04 on the CPU; a launch counts 1.
"""

from __future__ import annotations

import pytest

from dualpace.policy.cost_model import Point, TableCostModel
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.view import GpuView, RowView

COSTS = TableCostModel(
    [
        point
        for size in (1, 1000)
        for context in (0, 100_000)
        for point in (
            Point("gpu_decode", size, context, 10e-3 + 1e-5 * context),
            Point("gpu_prefill", size, context, 10e-3 + 1e-4 * size + 1e-5 * context),
            Point("cpu_attention", size, context, 4e-5 * context),
        )
    ]
)
POLICY = GatedPolicy(COSTS, layers=2, launch=0.5e-3)
GPU_ROWS = tuple(RowView(f"g{i}", i, 100, 99, 7) for i in range(2))
# CPU attention: 8, 12, 6, 0.8, 12.4 and 0.2 ms.
HOST_ROWS = tuple(
    RowView(f"h{i}", 10 + i, tokens, tokens - 1, 30, "host")
    for i, tokens in enumerate((200, 300, 150, 20, 310, 5))
)


def view(**fields: object) -> GpuView:
    defaults = {
        "now": 0.0, "page_tokens": 10, "pages_total": 40, "pages_free": 10, "max_rows": 64,
        "max_tokens": 2000, "host_open": True, "host_pages_total": 1000, "host_pages_free": 900,
        "decoding": GPU_ROWS,
    }  # fmt: skip
    return GpuView(**{**defaults, **fields})  # type: ignore[arg-type]


def test_host_rows_are_admitted_while_each_half_is_covered_by_the_other() -> None:
    """With 200 tokens on the GPU the first half has 10 dense + 2 of its own attention to cover it,
    the second 10. h0: 8 + 1 of 10 in the second. h1: 12 + 1 of 12 in the first, rejected. h2: 6 + 1
    of 12, h3: 6.8 + 1 of 12; h4, longer than h1, is not tried; h5 fits. 2 + 5 tokens in 22 ms are
    more than 2 in 12."""
    tight = view(host=HOST_ROWS, pages_total=32)  # no room to swap in
    assert POLICY.plan_gpu(tight).gate == (("h2", "h3", "h5"), ("h0",))


def test_after_a_rejection_longer_rows_are_skipped_even_where_the_other_half_has_room() -> None:
    rows = tuple(
        RowView(f"h{i}", 10 + i, tokens, tokens - 1, 30, "host")
        for i, tokens in enumerate((20, 300, 250, 299))
    )
    # h0 in the second leaves it 8.2, the first 11: h1 is too long for it, h2 takes 10 + 1 of 12.
    assert POLICY.plan_gpu(view(host=rows, pages_total=21)).gate == (("h2",), ("h0",))


def test_the_gate_stays_shut_where_the_gpu_alone_yields_more() -> None:
    """6 rows in 10 + 6 ms alone, 9 in 16 + 10 with the host's."""
    six = tuple(RowView(f"g{i}", i, 100, 99, 11) for i in range(6))
    tight = view(decoding=six, host=HOST_ROWS[:4], pages_total=61)
    assert POLICY.plan_gpu(tight).gate == ((), ())


def test_a_launch_that_no_step_covers_keeps_the_gate_shut() -> None:
    """12 ms of launches in 12 ms of steps: what a fast GPU does to 0.8 ms a layer."""
    slow = GatedPolicy(COSTS, layers=15)
    assert slow.plan_gpu(view(host=HOST_ROWS[-1:], pages_total=20)).gate == ((), ())


@pytest.mark.parametrize(("total", "out"), [(20, ()), (19, ("g1",)), (9, ("g1", "g0"))])
def test_the_youngest_are_swapped_out_above_all_pages(total: int, out: tuple[str, ...]) -> None:
    decision = POLICY.plan_gpu(view(pages_total=total, pages_free=0, host=HOST_ROWS))
    assert (decision.demote, decision.promote) == (out, ())


@pytest.mark.parametrize(("total", "into"), [(41, ()), (42, ("h0",)), (74, ("h0", "h1"))])
def test_the_oldest_are_swapped_in_below_95_percent(total: int, into: tuple[str, ...]) -> None:
    """20 pages decode; h0 needs 20 and h1 30 more: 40 ≤ 0.95 × 42 = 39.9 ≈ 40."""
    assert POLICY.plan_gpu(view(pages_total=total, host=HOST_ROWS)).promote == into


def test_prompts_go_to_the_gpu_until_one_does_not_fit_and_then_all_to_the_host() -> None:
    waiting = tuple(RowView(f"w{i}", 20 + i, tokens) for i, tokens in enumerate((100, 150, 50)))
    decision = POLICY.plan_gpu(view(waiting=waiting))
    # Without w1 102 tokens would leave the dense layers unsaturated; with it w2 has no place.
    assert (decision.admit, decision.reserve) == (("w0",), ("w1",))
    small = tuple(RowView(f"w{i}", 20 + i, tokens) for i, tokens in enumerate((210, 30, 30)))
    decision = POLICY.plan_gpu(view(waiting=small))
    assert (decision.admit, decision.reserve) == ((), ("w0",))
