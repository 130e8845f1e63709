"""A profile as `dualpace profile` prints it: tables to stdout, its place to stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from dualpace.cli.tables import table_console
from dualpace.policy.cost_model import OPERATIONS, PARTS, Operation, Point
from dualpace.profile.table import Profile, path_of


def report(profile: Profile) -> None:
    """Print a profile just stored, and where it is."""
    show_profile(profile)
    tell_place(path_of(profile.fingerprint))


def tell_place(path: Path) -> None:
    Console(stderr=True).print(f"stored in {path}", markup=False, highlight=False, soft_wrap=True)


def show_profile(profile: Profile) -> None:
    console = table_console()
    console.print(
        f"{profile.model}, {profile.fingerprint.dtype}, {profile.date}, on "
        f"{profile.fingerprint.hardware}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if profile.note:
        console.print(profile.note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"copies between the tiers: {profile.copy_bandwidth / 1e9:.3g} GB/s")
    for operation in (*OPERATIONS, *PARTS):
        points = [point for point in profile.points if point.operation == operation]
        if points:
            console.print(_table(operation, points))


def _table(operation: Operation, points: list[Point]) -> Table:
    """Sizes down, contexts across, milliseconds in the cells."""
    size = "tokens" if operation == "gpu_prefill" else "rows"
    title = f"{operation}: ms by {size} and tokens of context"
    table = Table(title=title, title_justify="left", min_width=len(title))
    contexts = sorted({point.context for point in points})
    table.add_column(size, justify="right")
    for context in contexts:
        table.add_column(str(context), justify="right")
    seconds = {(point.size, point.context): point.seconds for point in points}
    for rows in sorted({point.size for point in points}):
        cells = (seconds.get((rows, context)) for context in contexts)
        table.add_row(str(rows), *("" if cell is None else f"{cell * 1e3:.4g}" for cell in cells))
    return table
