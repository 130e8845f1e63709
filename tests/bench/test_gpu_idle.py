"""The arithmetic of benchmarks/gpu_idle.py on intervals whose answer is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_idle.py"


@pytest.fixture(scope="module")
def gpu_idle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_idle", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overlapping_kernels_are_busy_once_and_gaps_are_told_apart(gpu_idle: ModuleType) -> None:
    first = [(0.0, 40.0), (30.0, 50.0), (52.0, 100.0), (60.0, 70.0)]  # busy 98, a gap of 2
    second = [(130.0, 180.0), (180.0, 230.0)]  # busy 100, after a gap of 30
    report = gpu_idle.summarize([*second, *first], 2, [110e-6, 100e-6, 130e-6])
    assert report["busy_ms_per_step"] == pytest.approx(0.099)
    assert report["step_ms_p50"] == pytest.approx(0.110)
    assert report["idle_share"] == pytest.approx(0.1)
    assert report["profiled_step_ms"] == pytest.approx(0.115)
    assert report["profiled_idle_share"] == pytest.approx(32 / 230)
    assert report["profiled_idle_share_in_long_gaps"] == pytest.approx(30 / 230)
    assert (report["long_gaps_per_step"], report["long_gap_us_p50"]) == (0.5, 30.0)


def test_steps_continue_the_same_requests_in_pages_of_their_own(gpu_idle: ModuleType) -> None:
    steps = list(gpu_idle.decode_steps(3, first=14, rows=2, context=17, pages=3, page_tokens=16))
    assert [[row.end for row in step.rows] for step in steps] == [[31, 31], [32, 32], [33, 33]]
    assert [row.pages for row in steps[1].rows] == [[0, 1], [3, 4]]
    assert [row.pages for row in steps[2].rows] == [[0, 1, 2], [3, 4, 5]]
