"""The roof of section "When it helps" on machines whose numbers can be worked out by hand."""

from __future__ import annotations

import pytest

from dualpace.core.plan import Route
from dualpace.policy.cost_model import Operation, Point, TableCostModel
from dualpace.policy.host import HostRules
from dualpace.policy.roof import find_roof


def costs(**seconds: tuple[float, float]) -> TableCostModel:
    """(fixed, per token of context) of each operation."""
    points = []
    for operation, (fixed, slope) in seconds.items():
        name: Operation = operation  # type: ignore[assignment]
        points += [
            Point(name, rows, context, fixed + slope * context)
            for rows in (1, 256)
            for context in (0, 1_000_000)
        ]
    return TableCostModel(points)


def test_a_host_that_reads_a_tenth_as_fast_adds_a_tenth() -> None:
    machine = costs(gpu_decode=(0.0, 1e-6), cpu_iteration=(0.0, 1e-5))
    roof = find_roof(HostRules(machine, 1e9), 10_000, 50_000, 256, 1000)
    assert roof is not None
    assert roof.gpu_rate == pytest.approx(1000.0)  # 10 seats in 10 ms
    assert roof.host_rate == pytest.approx(100.0)  # 50 rows in 500 ms
    assert roof.ratio == pytest.approx(1.1)


@pytest.mark.parametrize(("route", "share"), [("assist", 0.02 / 0.6), ("assist2", 0.04 / 0.5)])
def test_what_assists_take_from_the_gpu_comes_off(route: Route, share: float) -> None:
    machine = costs(
        gpu_decode=(0.0, 1e-6), cpu_attention=(0.0, 1e-5), assist=(0.1, 0.0),
        assist_stolen=(0.02, 0.0),
    )  # fmt: skip
    roof = find_roof(HostRules(machine, 1e9, (route,)), 10_000, 50_000, 256, 1000)
    assert roof is not None
    assert roof.stolen_share == pytest.approx(share)
    assert roof.ratio == pytest.approx(1.0 + roof.host_rate / 1000.0 - share)


def test_the_target_bounds_the_hosts_batch_and_with_it_the_roof() -> None:
    machine = costs(gpu_decode=(0.0, 1e-6), cpu_iteration=(0.1, 1e-5))
    rates = []
    for target in (0.2, 1e9):
        roof = find_roof(HostRules(machine, target), 10_000, 50_000, 256, 1000)
        assert roof is not None
        rates.append(roof.host_rate)
    assert rates[0] == pytest.approx(10 / 0.2)
    assert rates[1] == pytest.approx(50 / 0.6)


def test_without_seats_or_measurements_there_is_no_roof() -> None:
    machine = costs(gpu_decode=(0.0, 1e-6), cpu_iteration=(0.0, 1e-5))
    assert find_roof(HostRules(machine, 1e9), 900, 50_000, 256, 1000) is None
    assert find_roof(HostRules(machine, 1e9), 10_000, 900, 256, 1000) is None
    blind = costs(cpu_iteration=(0.0, 1e-5))
    assert find_roof(HostRules(blind, 1e9), 10_000, 50_000, 256, 1000) is None
