"""The verdict of benchmarks/simulated_beside_measured.py."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simulated_beside_measured.py"
compare: Callable[[dict[str, Any], list[dict[str, Any]]], bool] = runpy.run_path(str(SCRIPT))[
    "compare"
]


def report(rate: float, itl: float | None, cpu_itl: float | None) -> dict[str, Any]:
    """Of a server whose CPU engine made tokens `cpu_itl` seconds apart, or none."""
    return {
        "load": "a load",
        "duration_s": 10.0,
        "output_tokens_per_s": rate,
        "tokens_by_engine": {"gpu": 50} | ({"cpu": 50} if cpu_itl else {}),
        "ttft_s": {"p50": 1.0, "p99": 2.0},
        "itl_s": {"p50": itl, "p99": itl},
        "itl_by_engine_s": {"cpu": {"p50": cpu_itl}} if cpu_itl else {},
    }


@pytest.mark.parametrize(
    ("measured", "simulated", "close"),
    [
        (report(10.0, 0.1, 0.2), [report(10.9, 0.12, 0.5)], True),
        (report(10.0, 0.1, 0.2), [report(11.1, 0.1, 0.2)], False),
        (report(10.0, 0.1, 0.2), [report(11.1, 0.1, 0.2), report(10.7, 0.1, None)], True),
        (report(10.0, 0.1, 0.2), [report(11.1, 0.1, 0.2), report(11.2, 0.1, 0.2)], False),
        (report(10.0, 0.1, 0.2), [report(10.0, 0.13, 0.2)], False),
        (report(10.0, 0.1, None), [report(10.0, 0.1, 0.2)], True),
        (report(10.0, 0.1, 0.2), [report(10.0, 0.1, None)], True),
        (report(10.0, None, None), [report(10.0, None, None)], False),
    ],
)
def test_rate_and_tail_decide_and_an_engine_without_work_is_no_error(
    measured: dict[str, Any], simulated: list[dict[str, Any]], close: bool
) -> None:
    assert compare(measured, simulated) is close
