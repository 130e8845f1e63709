"""Where a command's tables go: to stdout, as wide as the terminal, or as any table without one."""

from __future__ import annotations

import io
import sys

from rich.console import Console

WIDTH = 120  # columns


def table_console() -> Console:
    """A console on stdout that wraps no table where there is no terminal to fit it into, and shows
    what stdout cannot encode as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    return console
