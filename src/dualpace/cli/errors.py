"""How a command tells a person that it could not go on, and its exit code.

2    what was asked cannot work: an option, the model, this machine. Typer's own for wrong usage
1    something failed
130  Ctrl-C, or SIGTERM
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from dualpace.core.errors import (
    ConfigError,
    DualPaceError,
    HardwareError,
    ModelError,
    RequestError,
)

CANNOT_WORK = (ConfigError, HardwareError, ModelError, RequestError)


@contextlib.contextmanager
def explained(prefix: str = "error:") -> Iterator[None]:
    """An error that a user can mend is told in one line on stderr, and ends the command. Within,
    SIGTERM is as Ctrl-C."""
    console = Console(stderr=True)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (DualPaceError, OSError) as error:
        console.print(f"[red]{prefix}[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, CANNOT_WORK) else 1) from None
    except MemoryError as error:
        reason = f"out of memory: {error}" if str(error) else "out of memory"
        console.print(f"[red]{prefix}[/red] {escape(reason)}", soft_wrap=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[yellow]stopped[/yellow]")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
