"""How far a profile's predictions are from measurements that it was not made from."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dualpace.policy.cost_model import WHOLES, Operation, Point, TableCostModel, cpu_step
from dualpace.policy.surface import Estimate

# What a profile that is fit for use keeps to.
MEDIAN_BOUND, P90_BOUND = 0.08, 0.20


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of one operation's predictions, of which the median and the 90th percentile
    know no sign; extrapolated: how many were marked so."""

    operation: Operation
    points: int
    median: float
    p90: float
    worst: Point
    worst_error: float  # above 0 where too much was predicted
    extrapolated: int

    @property
    def good(self) -> bool:
        return self.median <= MEDIAN_BOUND and self.p90 <= P90_BOUND


def predict(costs: TableCostModel, point: Point) -> Estimate:
    """What `costs` say of a measured point. Raises `ConfigError` if they do not cover it."""
    match point.operation:
        case "cpu_iteration":
            return costs.cpu_iteration(point.size, point.context)
        case "cpu_attention":
            return costs.cpu_attention(point.size, point.context)
        case "gpu_decode":
            return costs.gpu_decode(point.size, point.context)
        case "gpu_prefill":
            return costs.gpu_prefill(point.size, point.context)
        case "assist":
            return costs.assist(point.size, 0.0)
        case "assist_beside_prefill":
            return costs.assist(point.size, 1.0)
        case "assist_stolen":
            return costs.assist_stolen(point.size, point.context, 0.0)
        case "assist_stolen_beside_prefill":
            return costs.assist_stolen(point.size, point.context, 1.0)
        case "assist2":
            return costs.assist(point.size, 0.0, slots=2)
        case "assist2_beside_prefill":
            return costs.assist(point.size, 1.0, slots=2)
        case "assist2_stolen":
            return costs.assist_stolen(point.size, point.context, 0.0, slots=2)
        case "assist2_stolen_beside_prefill":
            return costs.assist_stolen(point.size, point.context, 1.0, slots=2)
        case "assisted" | "assisted2":
            route = WHOLES[point.operation]
            return cpu_step(costs, route, point.size, point.context, prefill_share=0.0)


def accuracy(costs: TableCostModel, measured: Iterable[Point]) -> list[Accuracy]:
    """One entry for each operation that was measured."""
    errors: dict[Operation, list[tuple[float, bool, Point]]] = {}
    for point in measured:
        seconds, extrapolated = predict(costs, point)
        error = seconds / point.seconds - 1.0
        errors.setdefault(point.operation, []).append((error, extrapolated, point))
    return [_accuracy(operation, found) for operation, found in errors.items()]


def write_points(path: Path, costs: TableCostModel, measured: Iterable[Point]) -> None:
    """A line for each point, seconds as measured and as predicted."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["operation", "size", "context", "measured_s", "predicted_s", "extrapolated"]
        )
        for point in measured:
            seconds, extrapolated = predict(costs, point)
            writer.writerow(
                [point.operation, point.size, point.context, point.seconds, seconds,
                 int(extrapolated)]
            )  # fmt: skip


def _accuracy(operation: Operation, found: list[tuple[float, bool, Point]]) -> Accuracy:
    sizes = sorted(abs(error) for error, _, _ in found)
    worst_error, _, worst = max(found, key=lambda entry: abs(entry[0]))
    return Accuracy(
        operation,
        points=len(found),
        median=statistics.median(sizes),
        p90=sizes[int(0.9 * (len(sizes) - 1) + 0.5)],
        worst=worst,
        worst_error=worst_error,
        extrapolated=sum(extrapolated for _, extrapolated, _ in found),
    )
