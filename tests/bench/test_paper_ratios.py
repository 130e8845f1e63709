"""The arithmetic of benchmarks/paper_ratios.py on lines whose ratio is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "paper_ratios.py"


@pytest.fixture(scope="module")
def paper_ratios() -> Any:
    spec = importlib.util.spec_from_file_location("paper_ratios", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_line(slope: float, rates: tuple[float, ...] = (1.0, 2.0, 4.0)) -> list[dict[str, Any]]:
    """A latency of `slope` milliseconds for each request per second, 100 tokens a request."""
    return [
        {
            "request_rate": rate, "output_tokens_per_s": 100 * rate, "failed": 0,
            "normalized_latency_s": {"mean": slope * rate / 1e3}, "itl_s": {"p99": 0.1},
        }
        for rate in rates
    ]  # fmt: skip


def test_ratios_are_those_of_what_two_lines_reach_at_one_latency(paper_ratios: ModuleType) -> None:
    comparison = paper_ratios.COMPARISONS[0]._replace(levels=(0.045, 0.06))
    lines = {"dualpace": make_line(20.0), "gated": make_line(30.0)}
    # 45 ms are reached at 2.25 and 1.5 requests a second, 60 ms at 3 and 2: the lines are straight.
    assert paper_ratios.compare(lines, "dualpace", comparison) == {
        "gated": pytest.approx([1.5, 1.5])
    }
    by_requests = comparison._replace(quantity="requests")
    assert paper_ratios.compare(lines, "dualpace", by_requests) == {
        "gated": pytest.approx([1.5, 1.5])
    }


def test_there_is_no_ratio_where_a_line_does_not_cross_the_level(paper_ratios: ModuleType) -> None:
    """At 25 ms the other one is past it from the start, at 100 ours is not there at the end, and
    its P99 ITL never gets to 160 ms."""
    throughput, itl = paper_ratios.COMPARISONS
    lines = {"dualpace": make_line(20.0), "gpu-only": make_line(30.0)}
    levels = throughput._replace(levels=(0.025, 0.1))
    assert paper_ratios.compare(lines, "dualpace", levels) == {"gpu-only": [None, None]}
    assert set(paper_ratios.compare(lines, "dualpace", itl)["gpu-only"]) == {None}
