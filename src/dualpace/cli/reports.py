"""What the commands that replay a load show of it: tables on stdout, files, one line of JSON last.

Chooses and shows; the numbers are `dualpace.bench`'s. A sweep has one table with a line for each
rate, and its JSON is an object with the list of reports under "sweep".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dualpace.bench.metrics import Summary, summarize
from dualpace.bench.plots import plot_tokens
from dualpace.bench.record import RequestRecord
from dualpace.bench.report import (
    Circumstances,
    report_dict,
    report_table,
    sweep_table,
    write_csv,
)
from dualpace.bench.sustainable import parse_targets, sustainable_rate
from dualpace.cli.load_flags import Load
from dualpace.cli.options import JsonFile, require_writable, written
from dualpace.cli.replays import print_failures
from dualpace.cli.tables import print_json, table_console
from dualpace.core.errors import ConfigError

INTERRUPTED = 130  # exit code after Ctrl-C

Hardware = Annotated[
    str | None,
    typer.Option(help="Named in report and plot. (default: this machine, if it is the server)"),
]


@dataclass(frozen=True)
class ReportFlags:
    """What is written, and what is named in it."""

    label: Annotated[
        str | None,
        typer.Option(help="Name in figures, such as vLLM. (default: the policy, where known)"),
    ] = None
    target: Annotated[
        str,
        typer.Option(
            help="Tell the highest rate of a sweep within these limits, such as "
            "ttft_s.p99=10,normalized_latency_s.mean=1 (seconds)."
        ),
    ] = ""
    json_file: JsonFile = None
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write a line for each request.")
    ] = None
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write the figure of tokens over time (PNG).")
    ] = None

    def check(self, loads: Sequence[Load]) -> None:
        """Raises `ConfigError` where a file could not be written or a flag does not fit."""
        require_writable(self.json_file, self.csv_file, figure=self.plot_file)
        finite = [load for load in loads if load.request_rate is not None]
        if parse_targets(self.target) and len(finite) < 2:
            raise ConfigError("--target needs --rates with two finite rates at least")
        if self.plot_file and len(loads) > 1:
            raise ConfigError("--plot shows one replay: draw a sweep with bench figures")


@dataclass(frozen=True)
class Outcome:
    """One replay, ready to be reported. extra: what its JSON begins with. caption: if not None, the
    last line of its table instead of where it was measured."""

    circumstances: Circumstances
    records: list[RequestRecord]
    window: tuple[float, float] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    caption: str | None = None

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.records, self.window)

    def to_dict(self) -> dict[str, Any]:
        return {**self.extra, **report_dict(self.circumstances, self.summary)}


def publish(
    outcomes: Sequence[Outcome],
    files: ReportFlags,
    console: Console,
    *,
    is_sweep: bool = False,
    interrupted: bool = False,
) -> None:
    """Print a table, then the line of JSON, and write the files. console: for failures.

    Raises `DualPaceError` naming a file that cannot be written. Exits with 130 if
    `interrupted`, with 1 where no request succeeded.
    """
    reports = [outcome.to_dict() for outcome in outcomes]
    result = _sweep(reports, files) if is_sweep else reports[0]
    line = json.dumps(result, allow_nan=False)
    for outcome in outcomes:
        print_failures(console, outcome.summary.failures)
    if is_sweep:
        table = sweep_table([(outcome.circumstances, outcome.summary) for outcome in outcomes])
    else:
        table = report_table(outcomes[0].circumstances, outcomes[0].summary)
    if outcomes[0].caption is not None:
        table.caption = escape(outcomes[0].caption)
    out = table_console()
    out.print(table)
    if "sustainable" in result:
        out.print(f"sustainable rate: {result['sustainable']['text']}", soft_wrap=True)
    # Files are last: a full disk loses no measurement.
    print_json(line, files.json_file)
    if files.csv_file:
        rows = [(outcome.circumstances.request_rate, outcome.records) for outcome in outcomes]
        with written(files.csv_file):
            write_csv(files.csv_file, rows)
    if files.plot_file:
        with written(files.plot_file):
            plot_tokens(files.plot_file, outcomes[0].records, outcomes[0].circumstances)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not any(outcome.summary.succeeded for outcome in outcomes):
        raise typer.Exit(1)


def _sweep(reports: Sequence[dict[str, Any]], files: ReportFlags) -> dict[str, Any]:
    """The sweep's JSON, with the sustainable rate where a target asks for it."""
    result: dict[str, Any] = {"sweep": reports}
    targets = parse_targets(files.target)
    points = [(report["request_rate"] or math.inf, report) for report in reports]
    if targets and any(math.isfinite(rate) for rate, _ in points):  # an early Ctrl-C leaves none
        found = sustainable_rate(points, targets)
        result["targets"] = [asdict(target) for target in targets]
        result["sustainable"] = {**asdict(found), "text": str(found)}
    return result
