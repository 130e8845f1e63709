"""`dualpace profile`: measure what this machine takes for this model, and look at what is stored.

Chooses and shows; the work is done by the rooms of `dualpace.profile`. Progress goes to stderr,
tables to stdout.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpace.cli.errors import explained
from dualpace.cli.logs import set_up_logging
from dualpace.cli.measurement import Measured, MeasureFlags, measure_and_store, resolve_measured
from dualpace.cli.options import CpuCores, Model, require_writable, takes_options, written
from dualpace.cli.profile_report import report, show_profile, tell_place
from dualpace.cli.tables import table_console
from dualpace.core.config import EngineOptions
from dualpace.profile.chart import draw
from dualpace.profile.check import MEDIAN_BOUND, P90_BOUND, Accuracy, accuracy, write_points
from dualpace.profile.shipped import file_of, shipped_names
from dualpace.profile.table import find, load, path_of

profile_app = typer.Typer(
    help="Measure what steps of a model take on this machine.", no_args_is_help=True
)

Seconds = Annotated[float, typer.Option(min=0.0, help="About how long to measure, loading apart.")]


@profile_app.command()
@takes_options
def run(model: Model, flags: MeasureFlags, seconds: Seconds = 30.0) -> None:
    """Measure MODEL, store the profile, print it.

    An earlier profile of the same machine and model is replaced. After Ctrl-C, or SIGTERM, what was
    measured is kept, and of the earlier one what was not reached, if it was measured with the same
    options.
    """
    set_up_logging(logging.WARNING)
    with explained():
        report(measure_and_store(flags.options(model), seconds))


@profile_app.command()
def show(
    model: Annotated[
        str, typer.Argument(help="What was measured, a profile's .json file or shipped name.")
    ],
    cpu_cores: CpuCores = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            help="Also draw by which route a CPU batch gains most, and what either engine takes "
            "for what (.png, .svg or .pdf)."
        ),
    ] = None,
) -> None:
    """Print the stored profile of MODEL on this machine, or the one in a file; last, its place."""
    set_up_logging(logging.WARNING)
    with explained():
        require_writable(figure=chart)
        if model.endswith(".json") or model in shipped_names():
            path = file_of(model)
            profile = load(path)
        else:
            fingerprint = resolve_measured(EngineOptions(model=model, cpu_cores=cpu_cores))[1]
            path, profile = path_of(fingerprint), find(fingerprint)
        show_profile(profile)
        tell_place(path)
        if chart is not None:
            with written(chart):
                draw(profile, chart)


@profile_app.command()
@takes_options
def check(
    model: Model,
    flags: MeasureFlags,
    seconds: Seconds = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the points that are drawn.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write a line for each point.")] = None,
) -> None:
    """Measure points that the stored profile of MODEL does not have, and print how far off it is.

    Fails where an operation's errors exceed 8% at the median or 20% at the 90th percentile.
    """
    set_up_logging(logging.WARNING)
    with explained():
        require_writable(csv)
        config, fingerprint = resolve_measured(flags.options(model))
        profile = find(fingerprint)
        if not config.gpu_pages:
            pages = profile.gpu_kv_tokens // config.page_tokens
            config = msgspec.structs.replace(config, gpu_pages=pages or config.gpu_pages)
        measured = Measured(held_out=seed)
        measured.run(config, seconds, Console(stderr=True))
        costs = profile.cost_model()
        found = accuracy(costs, measured.points)
        if csv is not None:
            with written(csv):
                write_points(csv, costs, measured.points)
    table_console().print(_accuracy_table(profile.date, found))
    off = [each.operation for each in found if not each.good]
    if off or not found:
        Console(stderr=True).print(
            f"failed: {', '.join(off)} off by more than {MEDIAN_BOUND:.0%} at the median or "
            f"{P90_BOUND:.0%} at the 90th percentile" if off else "failed: nothing was measured",
            soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(1)


def _accuracy_table(date: str, found: list[Accuracy]) -> Table:
    table = Table(title=f"predictions of {date}", title_justify="left")
    for title in ("operation", "points", "median", "p90", "worst", "extrapolated"):
        table.add_column(title, justify="left" if title == "operation" else "right")
    for each in found:
        worst = f"{each.worst_error:+.0%} at {each.worst.size} × {each.worst.context}"
        table.add_row(
            each.operation, str(each.points), f"{each.median:.1%}", f"{each.p90:.1%}", worst,
            str(each.extrapolated),
        )  # fmt: skip
    return table
