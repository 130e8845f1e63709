"""Accuracy of predictions, held-out points, and the chart of routes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dualpace.policy.cost_model import OPERATIONS, Operation, Point, TableCostModel
from dualpace.profile.chart import attention_latencies, dense_latencies, draw, regions
from dualpace.profile.check import accuracy
from dualpace.profile.probes import Room, held_out_points, make_batch, plan_points
from dualpace.profile.shipped import open_profile

ROOM = Room("host", pages=2000, page_tokens=16, max_rows=64, max_tokens=512, max_model_len=4000)
COSTS = TableCostModel(
    Point("gpu_decode", size, context, 1.0 + context / 100)
    for size in (1, 8)
    for context in (0, 100)
)


def test_errors_are_relative_and_taken_per_operation() -> None:
    """Predicted 1.5 s each; measured 1.5, 1.5 / 1.1, … so that errors are 0, 10, … 100%."""
    measured = [Point("gpu_decode", 1 + i % 8, 50, 1.5 / (1 + i / 10)) for i in range(11)]
    [found] = accuracy(COSTS, measured)
    assert found.median == pytest.approx(0.5)
    assert found.p90 == pytest.approx(0.9)
    assert (found.worst, found.worst_error) == (measured[10], pytest.approx(1.0))
    assert (found.points, found.extrapolated, found.good) == (11, 0, False)
    [exact] = accuracy(COSTS, [Point("gpu_decode", 2, 200, 3.0)])
    assert (exact.median, exact.extrapolated, exact.good) == (0.0, 1, True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_held_out_points_can_be_measured_and_are_none_of_the_profiles(operation: Operation) -> None:
    points = held_out_points(operation, ROOM, 30, seed=1)
    assert len({*points}) == len(points) > 10
    assert not {*points} & {*plan_points(operation, ROOM)}
    assert all(make_batch(operation, *point, ROOM) is not None for point in points)
    assert points == held_out_points(operation, ROOM, 30, seed=1)
    assert points != held_out_points(operation, ROOM, 30, seed=2)


def test_few_rows_stay_local_and_many_are_assisted() -> None:
    rows, contexts, best, seconds = regions(open_profile("rtx4090-llama-3.1-8b"))
    assert best.shape == (len(rows), len(contexts)) == seconds.shape
    assert best[0, 0] == 1
    assert best[-1, np.searchsorted(contexts, 1000)] > 1
    assert (np.diff(seconds[:, 0][best[:, 0] == 1]) >= 0).all()


def test_dense_layers_and_attention_add_up_to_a_step() -> None:
    profile = open_profile("rtx4090-llama-3.1-8b")
    costs = profile.cost_model()
    rows, dense = dense_latencies(profile)
    contexts, attention = attention_latencies(profile)
    assert set(dense) == {"GPU", "CPU", "GPU for the CPU engine"}
    assert set(attention) == {"GPU", "CPU"}
    rest = np.interp(32, rows, dense["GPU"])
    for context, seconds in zip(contexts, attention["GPU"], strict=True):
        step = costs.gpu_decode(32, int(context)).seconds
        assert rest + seconds == pytest.approx(step)


def test_the_chart_is_written(tmp_path: Path) -> None:
    file = tmp_path / "chart.png"
    draw(open_profile("h200-llama-3.1-70b"), file)
    assert file.read_bytes().startswith(b"\x89PNG")
