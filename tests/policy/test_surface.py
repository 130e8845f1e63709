"""The surface against numpy: exact on points, linear between, monotone everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from dualpace.policy.surface import Surface

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


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("near", [1000, 1010, 1100, 1300])
def test_points_that_are_close_to_each_other_tell_no_slope(near: int, seed: int) -> None:
    """Noise of a few percent would make any slope of them."""
    rng = np.random.default_rng(seed)
    surface = Surface(
        [
            (x, y, (1.0 + 0.01 * x + 0.01 * y) * rng.uniform(0.95, 1.05))
            for x, last in ((2, 1000), (16, near), (64, 1000))
            for y in (0, 250, last)
        ]
    )
    for x in (2, 8, 64):
        assert surface.at(x, 3000).seconds == pytest.approx(31.0 + 0.01 * x, rel=0.2)


def test_a_size_of_which_only_such_points_were_measured_grows_as_its_neighbours() -> None:
    others = [(2, y, 1.0 + 0.01 * y) for y in (0, 250, 1000, 5000)]
    surface = Surface([*others, (64, 1000, 11.6), (64, 1010, 12.0)])
    assert surface.at(64, 5000) == (pytest.approx(52.0, rel=0.01), True)


def test_a_corner_that_nobody_measured_is_marked() -> None:
    """One row cannot have the context of many: that corner is filled, and known to be a guess."""
    points = [(1, 16, 1.0), (1, 64, 1.5), (4, 64, 2.0), (4, 256, 4.0), (4, 1024, 12.0)]
    surface = Surface(points)
    assert surface.at(2, 64) == (pytest.approx(1.5 + 0.5 / 3), False)
    assert surface.at(1, 256) == (pytest.approx(1.5 + 0.5 * 192 / 48), True)
    assert surface.at(2, 200).extrapolated


@pytest.mark.parametrize("lone", [1, 4, 8])
def test_a_size_of_which_a_single_context_was_measured_grows_as_its_neighbours(lone: int) -> None:
    def truth(x: float, y: float) -> float:
        return 3.0 + 2.0 * x + 0.5 * y + 0.25 * min(max(x, 2), 6) * y

    others = [x for x in (1, 2, 4, 6, 8) if x != lone]
    points = [(x, y, truth(x, y)) for x in others for y in (0, 10, 50)]
    surface = Surface([*points, (lone, 0, truth(lone, 0))])
    assert surface.at(lone, 0) == (pytest.approx(truth(lone, 0)), False)
    for y in (10, 30, 50):
        assert surface.at(lone, y) == (pytest.approx(truth(lone, y)), True)


def test_noise_is_evened_out_half_way() -> None:
    noisy, quiet = (1.0, 3.0, 2.0), (1.0, 5.0, 5.0)
    surface = Surface([(x, y, z[y]) for x, z in enumerate((noisy, quiet)) for y in range(3)])
    assert [surface.at(0, y).seconds for y in range(3)] == [1.0, 2.5, 2.5]
