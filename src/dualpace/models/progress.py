"""Shows how far the loading of weights has come: a bar on a terminal, else a log line now and then.

Knows bytes and time, not where weights come from or go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from dualpace.models.tensors import Weight

logger = logging.getLogger(__name__)
LOG_INTERVAL = 5.0  # seconds

Show = Callable[[int], None]  # is given the bytes that are done


def with_progress(
    weights: Iterable[tuple[str, Weight]], total: int, who: str, *, bar: bool
) -> Iterator[tuple[str, Weight]]:
    """Hand `weights` on, `total` bytes in all; one counts as loaded when the next is asked for.

    who: loads them, for the log; bar: draw on stderr, a terminal that nobody else writes to
    meanwhile.
    """
    started = time.monotonic()
    done = 0
    display: AbstractContextManager[Show] = _bar(total) if bar else _log_lines(total, who)
    with display as show:
        for name, tensor in weights:
            yield name, tensor
            done += tensor.nbytes
            show(done)
    seconds = max(time.monotonic() - started, 1e-3)
    logger.info(
        "%s: %.3g GB of weights loaded in %.1f s (%.3g GB/s)",
        who, done / 1e9, seconds, done / 1e9 / seconds,
    )  # fmt: skip


@contextmanager
def _log_lines(total: int, who: str) -> Iterator[Show]:
    started = last = time.monotonic()

    def show(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LOG_INTERVAL and done < total:
            last = now
            logger.info(
                "%s: %.3g of %.3g GB of weights loaded (%.3g GB/s)",
                who, done / 1e9, total / 1e9, done / 1e9 / (now - started),
            )  # fmt: skip

    yield show


@contextmanager
def _bar(total: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    class CursorKept(Console):
        """Never hides the cursor: a process killed while it loads could not bring it back."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    columns = (
        TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=CursorKept(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)
