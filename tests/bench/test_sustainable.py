"""Sustainable rates from reports at a few rates, against numpy's interpolation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dualpace.bench.metrics import summarize
from dualpace.bench.sustainable import METRICS, Target, parse_targets, sustainable_rate
from dualpace.core.errors import ConfigError

RATES = [1.0, 2.0, 4.0, 8.0]
TTFT = [0.5, 0.7, 1.5, 9.0]
LATENCY = [0.05, 0.06, 0.3, 0.4]


def reports(failed: int = 0) -> list[tuple[float, dict[str, Any]]]:
    """At `RATES`; `failed` requests at the last of them."""
    return [
        (
            rate,
            {
                "failed": failed * (rate == RATES[-1]),
                "ttft_s": {"p99": ttft},
                "normalized_latency_s": {"mean": latency},
            },
        )
        for rate, ttft, latency in zip(RATES, TTFT, LATENCY, strict=True)
    ]


@pytest.mark.parametrize("limit", [0.5, 0.6, 0.7, 1.2, 1.5, 6.0])
def test_between_two_rates_the_metric_is_linear(limit: float) -> None:
    found = sustainable_rate(reports(), [Target("ttft_s", "p99", limit)])
    assert found.rate == pytest.approx(np.interp(limit, TTFT, RATES))
    assert found.verdict == "interpolated"


def test_every_target_must_be_met() -> None:
    targets = parse_targets("ttft_s.p99=6, normalized_latency_s.mean=0.18")
    found = sustainable_rate(reports(), targets)
    assert found.rate == pytest.approx(np.interp(0.18, LATENCY, RATES))
    assert found.limit == targets[1]


def test_the_ends_of_the_sweep_are_told_apart() -> None:
    above = sustainable_rate(reports(), parse_targets("ttft_s.p99=9"))
    assert (above.rate, above.verdict) == (8.0, "highest meets")
    assert "8/s or more" in str(above)
    below = sustainable_rate(
        reports(), parse_targets("ttft_s.p99=9,normalized_latency_s.mean=0.01")
    )
    assert (below.rate, below.verdict) == (None, "lowest misses")
    assert "below the lowest rate measured" in str(below)


def test_a_rate_at_which_requests_failed_meets_nothing() -> None:
    found = sustainable_rate(reports(failed=1), parse_targets("ttft_s.p99=100"))
    assert (found.rate, found.verdict) == (4.0, "interpolated")


def test_order_does_not_matter_and_all_at_once_is_no_rate() -> None:
    shuffled = [(math.inf, reports()[0][1]), *reports()[::-1]]
    targets = parse_targets("ttft_s.p99=1.2")
    assert sustainable_rate(shuffled, targets) == sustainable_rate(reports(), targets)


def test_a_dip_behind_a_miss_is_not_believed() -> None:
    points = reports()
    points[1][1]["ttft_s"]["p99"] = 3.0
    found = sustainable_rate(points, parse_targets("ttft_s.p99=2"))
    assert found.rate == pytest.approx(np.interp(2.0, [0.5, 3.0], [1.0, 2.0]))


def test_every_latency_of_a_summary_can_be_a_target() -> None:
    summary = summarize([]).to_dict()
    assert {"ttft_s", "itl_s", "tpot_s", "normalized_latency_all_s"} < set(METRICS)
    for metric in METRICS:
        assert math.isinf(Target(metric, "p99", 1.0).value(summary))


@pytest.mark.parametrize("text", ["ttft_s.p95=1", "ttft.p99=1", "ttft_s.p99", "ttft_s.p99=0", ","])
def test_what_is_no_target_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--target is METRIC.STATISTIC=SECONDS"):
        parse_targets(text)
