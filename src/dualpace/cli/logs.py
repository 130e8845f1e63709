"""One log format for all processes of a server."""

from __future__ import annotations

import logging

import typer


def set_up_logging(level: int) -> None:
    """Log lines with time, level, process and module to stderr."""
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)-7s [%(process)d] %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    # Third parties speak only when something is wrong.
    for name in ("httpx", "httpcore", "urllib3", "matplotlib", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def level_of(name: str) -> int:
    """The log level that --log-level names; anything else is a usage error."""
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise typer.BadParameter(f"{name!r} is not a log level", param_hint="--log-level")
    return level
