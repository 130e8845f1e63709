"""`dualpace bench figures`: draws what the reports of other commands tell.

Chooses; `bench.results` reads and `bench.figures` draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dualpace.bench.figures import FORMATS, draw_figures
from dualpace.bench.results import as_written, read_results
from dualpace.cli.errors import explained
from dualpace.cli.options import written
from dualpace.core.errors import ConfigError


def figures(
    files: Annotated[
        list[Path],
        typer.Argument(help="What --json wrote: of bench serve, offline or assist, or simulate."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures; made if missing.")],
    file_format: Annotated[str, typer.Option("--format", help="svg, png or pdf.")] = "svg",
) -> None:
    """Draw reports together: over time, by request rate, by host KV room, lengths, assists.

    Prints the files that it wrote, and on stderr what is missing for others. A report of
    `bench serve` belongs to a line of its --label; where two files tell of the same, their names
    are told. Exits with 1 if there is nothing to draw.
    """
    with explained():
        if file_format not in FORMATS:
            raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {file_format!r}")
        results = read_results(files)
        with written(out), as_written(files):
            out.mkdir(parents=True, exist_ok=True)
            drawn, missing = draw_figures(results, out, file_format)
    errors = Console(stderr=True)
    for line in missing:
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
    for path in drawn:
        typer.echo(path)
    if not drawn:
        raise typer.Exit(1)
