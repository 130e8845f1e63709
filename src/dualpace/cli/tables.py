"""Where a command's tables go, and its line of JSON last: to stdout.

Tables are as wide as the terminal, or as any table without one.
"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from dualpace.cli.options import written

WIDTH = 120  # columns


def table_console() -> Console:
    """A console on stdout that wraps no table where there is no terminal to fit it into."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    return console


def print_json(line: str, file: Path | None) -> None:
    """Print `line`, and then write it to `file` if there is one.

    Raises `DualPaceError` naming a file that cannot be written.
    """
    typer.echo(line)
    if file:
        with written(file):
            file.write_text(line + "\n", encoding="utf-8")
