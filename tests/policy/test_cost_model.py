"""What the cost model makes of its tables: steps, iterations, and what they take from others."""

from __future__ import annotations

import pytest

from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import (
    OPERATIONS,
    Point,
    TableCostModel,
    cpu_step,
)


def test_each_operation_has_its_own_table() -> None:
    points = [
        Point(operation, size, context, scale * (size + context))
        for scale, operation in enumerate(OPERATIONS, 1)
        for size in (1, 2)
        for context in (1, 2)
    ]
    model = TableCostModel(points)
    estimates = (model.cpu_iteration(2, 2), model.gpu_decode(2, 2), model.gpu_prefill(2, 2))
    assert [estimate.seconds for estimate in estimates] == [4.0, 8.0, 12.0]


def test_a_prompt_takes_as_long_as_the_tiles_that_it_begins() -> None:
    points = [Point("gpu_prefill", n, c, n + 0.001 * c) for n in (1, 2048) for c in (0, 4096)]
    costs, finer = TableCostModel(points, tile=64), TableCostModel(points)
    computed = {1: 1, 64: 64, 65: 128, 128: 128, 500: 512, 512: 512, 513: 640, 640: 640, 1000: 1024}
    for tokens, whole in computed.items():
        assert costs.gpu_prefill(tokens, 4096) == finer.gpu_prefill(whole, 4096)


def test_what_assists_take_from_prompts_follows_how_slow_they_are_there_until_it_is_measured() -> (
    None
):
    points = [
        Point(operation, size, 0, seconds * size)
        for size in (2, 64)
        for operation, seconds in (
            ("assist", 0.02), ("assist_beside_prefill", 0.05), ("assist_stolen", 0.01),
        )
    ]  # fmt: skip
    guessed = TableCostModel(points)
    measured = TableCostModel(
        [*points, *(Point("assist_stolen_beside_prefill", n, 0, 0.04 * n) for n in (2, 64))]
    )
    begun = TableCostModel([*points, Point("assist_stolen_beside_prefill", 64, 0, 64 * 0.025)])
    for costs, taken in ((guessed, 0.025), (begun, 0.025), (measured, 0.04)):
        for share in (0.0, 0.5, 1.0):
            expected = 0.01 + share * (taken - 0.01)
            assert costs.assist_stolen(30, 20_000, share).seconds == pytest.approx(30 * expected)
            assert costs.assist_stolen(60, 40_000, share, slots=2).seconds == pytest.approx(
                60 * expected
            )


def test_an_operation_with_too_few_points_is_refused_by_name() -> None:
    model = TableCostModel([Point("gpu_decode", 1, context, 1.0) for context in (1, 2)])
    with pytest.raises(ConfigError, match="too few points of gpu_decode"):
        model.gpu_decode(1, 1)


def in_turns(attention: float, busy: float, turn: float, layers: int = 1000) -> float:
    """Seconds of two halves, event by event: either attends on the one CPU, then keeps the one GPU
    `busy`, and may go on `turn` seconds after the GPU took it up."""
    cpu_free = gpu_free = 0.0
    ready = [0.0, 0.0]
    for _ in range(layers):
        for half in (0, 1):
            cpu_free = max(cpu_free, ready[half]) + attention
            begin = max(cpu_free, gpu_free)
            gpu_free, ready[half] = begin + busy, begin + turn
    return max(ready)


@pytest.mark.parametrize(
    ("attention", "busy", "turn"), [(3.0, 1.0, 2.0), (1.0, 0.5, 4.0), (0.5, 2.0, 2.5), (0, 2, 3)]
)
def test_two_halves_take_as_long_as_the_schedule_in_which_they_take_turns(
    attention: float, busy: float, turn: float
) -> None:
    layers = 1000
    whole = {
        "cpu_attention": attention * layers,
        "assist": turn * layers,
        "assist2": in_turns(0.0, busy, turn, layers),
    }
    costs = TableCostModel(
        Point(name, size, context, seconds)  # type: ignore[arg-type]
        for name, seconds in whole.items()
        for size in (1, 64)
        for context in ((0, 1000) if name == "cpu_attention" else (0,))
    )
    predicted = cpu_step(costs, "assist2", 32, 500, prefill_share=0.0).seconds
    assert predicted == pytest.approx(in_turns(attention, busy, turn, layers), rel=0.01)
