"""The cost model against numpy: exact on points, linear between, monotone everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import (
    OPERATIONS,
    Point,
    Surface,
    TableCostModel,
    cpu_step,
)

Points = list[tuple[float, float, float]]


def random_points(rng: np.random.Generator, *, monotone: bool) -> Points:
    """A random grid, ragged as a measured one is: few rows reach no long context and vice versa."""
    x = np.sort(rng.choice(300, rng.integers(2, 8), replace=False))
    y = np.sort(rng.choice(9000, rng.integers(2, 9), replace=False))
    z = np.cumsum(np.cumsum(rng.exponential(1.0, (len(x), len(y))), axis=0), axis=1)
    if not monotone:
        z *= rng.lognormal(0.0, 0.3, z.shape)
    kept = rng.random(z.shape) < 0.6
    kept[0, 0] = kept[-1, -1] = True
    return [
        (float(x[i]), float(y[j]), float(z[i, j])) for i, j in zip(*np.nonzero(kept), strict=True)
    ]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("monotone", [True, False])
def test_no_larger_step_is_ever_quicker(seed: int, monotone: bool) -> None:
    rng = np.random.default_rng(seed)
    surface = Surface(random_points(rng, monotone=monotone))
    for _ in range(100):
        low = rng.uniform(-10, [600, 20_000])  # to twice as far as was measured
        high = low + rng.uniform(0, [300, 9000]) * rng.integers(0, 2, 2)
        assert surface.at(*low).seconds <= surface.at(*high).seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_measured_points_are_returned_as_measured(seed: int) -> None:
    points = random_points(np.random.default_rng(seed), monotone=True)
    surface = Surface(points)
    for x, y, z in points:
        assert surface.at(x, y) == (pytest.approx(z, rel=1e-14), False)


def full_grid(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.array([1.0, 2.0, 5.0, 16.0])
    y = np.array([0.0, 64.0, 100.0, 1000.0])
    return x, y, np.cumsum(np.cumsum(rng.exponential(1.0, (4, 4)), axis=0), axis=1)


def test_agrees_with_numpy_along_each_axis() -> None:
    rng = np.random.default_rng(0)
    x, y, z = full_grid(rng)
    surface = Surface([(x[i], y[j], z[i, j]) for i in range(4) for j in range(4)])
    for i in range(4):
        for at in rng.uniform(0, 1000, 50):
            assert surface.at(x[i], at) == (pytest.approx(np.interp(at, y, z[i])), False)
    for j in range(4):
        for at in rng.uniform(1, 16, 50):
            assert surface.at(at, y[j]) == (pytest.approx(np.interp(at, x, z[:, j])), False)


def test_goes_on_linearly_beyond_the_points_and_says_so() -> None:
    def truth(x: float, y: float) -> float:
        return 3.0 + 2.0 * x + 0.5 * y + 0.25 * x * y

    surface = Surface([(x, y, truth(x, y)) for x in (1, 4, 8) for y in (0, 10, 50)])
    assert surface.at(5, 20) == (pytest.approx(truth(5, 20)), False)
    assert surface.at(80, 20) == (pytest.approx(truth(80, 20)), True)
    assert surface.at(5, 700) == (pytest.approx(truth(5, 700)), True)
    assert surface.at(0.5, 20) == (pytest.approx(truth(1, 20)), True)  # held below the first


def test_a_corner_that_nobody_measured_is_marked() -> None:
    """One row cannot have the context of many: that corner is filled, and known to be a guess."""
    points = [(1, 16, 1.0), (1, 64, 1.5), (4, 64, 2.0), (4, 256, 4.0), (4, 1024, 12.0)]
    surface = Surface(points)
    assert surface.at(2, 64) == (pytest.approx(1.5 + 0.5 / 3), False)
    assert surface.at(1, 256) == (pytest.approx(1.5 + 0.5 * 192 / 48), True)
    assert surface.at(2, 200).extrapolated


def test_noise_is_evened_out_half_way() -> None:
    noisy, quiet = (1.0, 3.0, 2.0), (1.0, 5.0, 5.0)
    surface = Surface([(x, y, z[y]) for x, z in enumerate((noisy, quiet)) for y in range(3)])
    assert [surface.at(0, y).seconds for y in range(3)] == [1.0, 2.5, 2.5]


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
    for costs, taken in ((guessed, 0.025), (measured, 0.04)):
        for share in (0.0, 0.5, 1.0):
            expected = 0.01 + share * (taken - 0.01)
            assert costs.assist_stolen(30, share).seconds == pytest.approx(30 * expected)
            assert costs.assist_stolen(60, share, slots=2).seconds == pytest.approx(60 * expected)


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
