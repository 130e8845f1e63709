"""The request rate that a server sustains within latency targets, from measurements at a few rates.

Between two neighbouring rates a metric is taken to be linear. Knows reports only as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from dualpace.bench.metrics import Distribution, Summary
from dualpace.core.errors import ConfigError

METRICS = tuple(field.name for field in fields(Summary) if field.type == "Distribution")
STATISTICS = tuple(field.name for field in fields(Distribution) if field.name != "count")

Verdict = Literal["interpolated", "highest meets", "lowest misses"]


@dataclass(frozen=True, slots=True)
class Target:
    """`metric`'s `statistic` may be `seconds` at most."""

    metric: str
    statistic: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric}.{self.statistic} ≤ {self.seconds:g} s"

    def value(self, report: Mapping[str, Any]) -> float:
        """Seconds in a report's dict. Infinite where a request failed or there is no value:
        a server that refuses what it cannot do in time does not meet the target."""
        value: float | None = report[self.metric][self.statistic]
        return math.inf if value is None or report["failed"] else value


@dataclass(frozen=True, slots=True)
class Sustainable:
    """`rate` in requests per second, None where even the lowest rate misses a target.

    verdict: whether `rate` lies between two measured rates, is the highest one measured (the true
    one is higher), or is unknown. limit: the target that ends it.
    """

    rate: float | None
    verdict: Verdict
    limit: Target | None

    def __str__(self) -> str:
        if self.rate is None:
            return f"below the lowest rate measured, where {self.limit} is missed already"
        if self.limit is None:
            return f"{self.rate:g}/s or more: the highest rate measured still meets all targets"
        return f"{self.rate:.3g}/s, where {self.limit} is reached"


def parse_targets(text: str) -> list[Target]:
    """`ttft_s.p99=10,normalized_latency_s.mean=1`: METRIC.STATISTIC=SECONDS with commas.

    Raises `ConfigError` naming the part that is none.
    """
    return [_parse(part.strip()) for part in text.split(",")] if text else []


def _parse(part: str) -> Target:
    name, _, number = part.partition("=")
    metric, _, statistic = name.partition(".")
    try:
        seconds = float(number)
    except ValueError:
        seconds = math.nan
    if metric in METRICS and statistic in STATISTICS and seconds > 0.0:
        return Target(metric, statistic, seconds)
    raise ConfigError(
        f"--target is METRIC.STATISTIC=SECONDS, got {part!r}; metrics are {', '.join(METRICS)}, "
        f"statistics {', '.join(STATISTICS)}"
    )


def sustainable_rate(
    reports: Iterable[tuple[float, Mapping[str, Any]]], targets: Iterable[Target]
) -> Sustainable:
    """The rate up to which every target is met. reports: (requests per second, report's dict).

    It ends where the first target is crossed, going up from the lowest rate; what a still higher
    rate gives is taken for luck. Infinite rates are left out: nothing lies between them and others.
    targets: at least one. Raises `ConfigError` without a finite rate.
    """
    points = sorted((point for point in reports if math.isfinite(point[0])), key=lambda p: p[0])
    if not points:
        raise ConfigError("a sustainable rate needs a finite request rate")
    ends = [_crossing(points, target) for target in targets]
    missed = [end for end in ends if end.rate is None]
    # Where one target is crossed at the highest rate and another is not at all, the first limits.
    return missed[0] if missed else min(ends, key=lambda end: (end.rate or 0.0, end.limit is None))


def _crossing(points: list[tuple[float, Mapping[str, Any]]], target: Target) -> Sustainable:
    before: tuple[float, float] | None = None
    for rate, report in points:
        value = target.value(report)
        if value > target.seconds:
            if before is None:
                return Sustainable(None, "lowest misses", target)
            low, met = before
            share = (target.seconds - met) / (value - met)  # 0 where the value is infinite
            return Sustainable(low + (rate - low) * share, "interpolated", target)
        before = rate, value
    return Sustainable(points[-1][0], "highest meets", None)
