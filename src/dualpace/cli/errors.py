"""How a command tells a person that it could not go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from dualpace.core.errors import DualPaceError


@contextlib.contextmanager
def explained(code: int = 1, prefix: str = "error:") -> Iterator[None]:
    """An error that a user can mend is told in one line on stderr, with exit code `code`; Ctrl-C
    ends the command with 130."""
    console = Console(stderr=True)
    try:
        yield
    except (DualPaceError, OSError) as error:
        console.print(f"[red]{prefix}[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[yellow]stopped[/yellow]")
        raise typer.Exit(130) from None
