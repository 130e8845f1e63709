"""Simulated policies in the terms of the published comparison: ratios at equal latency.

    python benchmarks/paper_ratios.py benchmarks/results/4090-simulated-rates-*.json

Reads what `simulated_figures.py --json` wrote: each policy at several request rates. Between two
rates everything is taken to be linear. A ratio is left out where either policy is past the level
at its lowest rate, or not yet there at its highest. JSON last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from dualpace.bench.results import as_written, read_results
from dualpace.bench.sustainable import Target, sustainable_rate
from dualpace.core.errors import ConfigError

NEO = ("gated", "gated-free")
Line = Sequence[Mapping[str, Any]]  # the reports of one policy, by ascending request rate


class Reached(NamedTuple):
    """Requests, and output tokens, per second at which a latency is reached."""

    requests: float
    tokens: float


class Comparison(NamedTuple):
    """What is compared at which levels of a latency (seconds), and what was published of it."""

    title: str
    metric: str
    statistic: str
    levels: tuple[float, ...]
    quantity: str  # a field of `Reached`
    published: Mapping[str, str]  # by policy


COMPARISONS = (
    Comparison(
        "throughput at equal mean normalized latency", "normalized_latency_s", "mean",
        (0.035, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15), "tokens",
        {"gpu-only": "1.115 to 1.906 (vLLM)"} | dict.fromkeys(NEO, "1.069 to 1.432 (NEO)"),
    ),
    Comparison(
        "request rate at equal P99 ITL", "itl_s", "p99",
        (0.16, 0.17, 0.18, 0.2, 0.22, 0.25, 0.3), "requests",
        dict.fromkeys(NEO, "1.073 to 1.505 (NEO)"),
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--ours", default="dualpace", help="the line that others are compared with")
    args = parser.parse_args()
    try:
        with as_written(args.files):
            lines = read_lines(args.files)
            if args.ours not in lines:
                raise ConfigError(
                    f"no report of {args.ours!r} with a request rate; there are {', '.join(lines)}"
                )
            made = [compare(lines, args.ours, comparison) for comparison in COMPARISONS]
            tables = [
                ratio_table(f"{comparison.title}, {args.ours} over …", comparison, ratios, lines)
                for comparison, ratios in zip(COMPARISONS, made, strict=True)
            ]
            tables.append(rate_table(lines))
    except ConfigError as error:
        parser.error(str(error))
    console = Console(width=110)
    for table in tables:
        console.print(table)
    print(json.dumps({each.title: ratios for each, ratios in zip(COMPARISONS, made, strict=True)}))


def read_lines(files: Sequence[Path]) -> dict[str, Line]:
    """The reports of each policy that have a request rate."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for result in read_results(files):
        if result.report.get("request_rate") is not None:
            lines.setdefault(result.label, []).append(result.report)
    return {name: sorted(line, key=lambda r: r["request_rate"]) for name, line in lines.items()}


def reach(line: Line, target: Target) -> Reached | None:
    """Where the policy's latency crosses `target`, None if it does not between two rates."""
    rates = [report["request_rate"] for report in line]
    found = sustainable_rate(zip(rates, line, strict=True), [target])
    if found.rate is None or found.verdict != "interpolated":
        return None
    tokens = np.interp(found.rate, rates, [report["output_tokens_per_s"] for report in line])
    return Reached(found.rate, float(tokens))


def compare(
    lines: Mapping[str, Line], ours: str, comparison: Comparison
) -> dict[str, list[float | None]]:
    """The quantity of the line called `ours` over each other line's, at each level."""
    ratios: dict[str, list[float | None]] = {name: [] for name in lines if name != ours}
    for level in comparison.levels:
        target = Target(comparison.metric, comparison.statistic, level)
        reached = reach(lines[ours], target)
        for name, row in ratios.items():
            other = reach(lines[name], target)
            if reached is None or other is None:
                row.append(None)
            else:
                quantity = comparison.quantity
                row.append(getattr(reached, quantity) / getattr(other, quantity))
    return ratios


def ratio_table(
    title: str,
    comparison: Comparison,
    ratios: Mapping[str, list[float | None]],
    lines: Mapping[str, Line],
) -> Table:
    table = Table(title=f"simulated: {title}", title_justify="left")
    table.add_column("")
    for level in comparison.levels:
        table.add_column(f"{level * 1e3:g} ms", justify="right")
    table.add_column("published")
    for name, row in ratios.items():
        cells = ("–" if ratio is None else f"{ratio:.3f}" for ratio in row)
        table.add_row(name, *cells, comparison.published.get(lines[name][0]["policy"], ""))
    return table


def rate_table(lines: Mapping[str, Line]) -> Table:
    """First tokens, and how the CPU gets on: what has no ratio."""
    table = Table(title="simulated: by request rate", title_justify="left")
    for title in (
        "req/s", "policy", "output tok/s", "of the CPU", "norm. ms/tok", "TTFT p50 s", "p99",
        "ITL p99 ms", "longest s", "CPU gap s",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title == "policy" else "right")
    reports = [(report["request_rate"], name, report) for name in lines for report in lines[name]]
    for rate, name, report in sorted(reports, key=lambda each: each[0]):
        gap = report["timeline"]["cpu_gap"]
        table.add_row(
            f"{rate:g}",
            name,
            f"{report['output_tokens_per_s']:.0f}",
            f"{report['tokens_by_engine'].get('cpu', 0) / report['output_tokens']:.0%}",
            f"{1e3 * report['normalized_latency_s']['mean']:.0f}",
            f"{report['ttft_s']['p50']:.2f}",
            f"{report['ttft_s']['p99']:.2f}",
            f"{1e3 * report['itl_s']['p99']:.0f}",
            f"{report['itl_s']['max']:.2f}",
            "–" if gap is None else f"{gap['end_s'] - gap['start_s']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
