"""What the commands that replay a load share: how fast and how long, Ctrl-C, the progress bar.

Chooses and shows, on stderr; the work is done by the rooms of `dualpace.bench`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Protocol, Unpack

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from dualpace.bench.load import LoadRequest, arrive_at_once, draw_prompts
from dualpace.bench.record import RequestRecord
from dualpace.bench.replay import Course, Progress
from dualpace.cli.load_flags import MAX_REQUESTS, Load
from dualpace.core.errors import ConfigError

MAX_SECONDS = 1e7  # of a replay: four months


@dataclass(frozen=True)
class LoopFlags:
    """How many requests are in flight, and for how long."""

    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_REQUESTS, help="Most requests in flight. (default: no limit)"),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=MAX_SECONDS,
            help="Measure a window of so many seconds, then stop. (default: until all is answered)",
        ),
    ] = None
    warmup_seconds: Annotated[
        float,
        typer.Option(min=0.0, max=MAX_SECONDS, help="When the window of --duration begins."),
    ] = 0.0

    def check(self) -> None:
        """Raises `ConfigError` where the flags cannot go together."""
        if self.warmup_seconds and self.duration is None:
            raise ConfigError("--warmup-seconds needs --duration")

    @property
    def seconds(self) -> float | None:
        """When the replay is cut off, if at all."""
        return None if self.duration is None else self.warmup_seconds + self.duration

    @property
    def text(self) -> str:
        """What there is to tell of it, to be appended to what is asked of the server; after the
        semicolon what is the observer's business."""
        limit = f", at most {self.max_concurrency} in flight" if self.max_concurrency else ""
        if self.duration is None:
            return limit
        return f"{limit}; {self.duration:g} s after {self.warmup_seconds:g} s of warm-up"

    @property
    def window(self) -> tuple[float, float] | None:
        """From when to when it is looked at more closely, seconds."""
        return None if self.seconds is None else (self.warmup_seconds, self.seconds)


@dataclass(frozen=True)
class PaceFlags(LoopFlags):
    """The same for a server, which may need to warm up."""

    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests sent beforehand, which are not counted.")
    ] = 1


class Sender(Protocol):
    """`bench.replay.replay` with the prompts to send."""

    def __call__(
        self,
        load: Sequence[LoadRequest],
        prompts: Sequence[list[int]],
        **course: Unpack[Course],
    ) -> Awaitable[list[RequestRecord]]: ...


@dataclass
class Measurement:
    """A load on its way through a server, and what came of it."""

    load: Load
    pace: PaceFlags
    vocab_size: int  # prompts are random token ids below this
    seed: int
    records: list[RequestRecord] = field(default_factory=list)
    interrupted: bool = False

    async def run(self, send: Sender, console: Console) -> None:
        """Warm up, then replay. Ctrl-C ends either, the replay with what it has."""
        load = self.load.requests
        warmups = arrive_at_once(load[: self.pace.num_warmups])
        prompts = draw_prompts([*load, *warmups], self.vocab_size, self.seed)
        stop = asyncio.Event()
        with _until_interrupted(stop):
            if warmups:
                with console.status("warming up"):
                    await send(warmups, prompts[len(load) :], stop=stop)
            if not stop.is_set():
                with progress_bar(console, len(load)) as bar:
                    self.records = await send(
                        load,
                        prompts[: len(load)],
                        max_concurrency=self.pace.max_concurrency,
                        seconds=self.pace.seconds,
                        stop=stop,
                        on_progress=bar,
                    )
        self.interrupted = stop.is_set()
        warn_if_ran_out(self.records, len(load), self.pace, console)

    @property
    def window(self) -> tuple[float, float] | None:
        """The seconds to look at closer: of a replay that was cut off, or had to be."""
        if self.pace.duration is None and not self.interrupted:
            return None
        end = max((record.end_s for record in self.records), default=0.0)
        return min(self.pace.warmup_seconds, end), end


def warn_if_ran_out(
    records: Sequence[RequestRecord], total: int, loop: LoopFlags, console: Console
) -> None:
    """Tell where all of `total` requests were answered before the time to measure was over."""
    if loop.seconds is None or len(records) < total or any(record.cut for record in records):
        return
    end = max(record.end_s for record in records)
    when = "in" if end > loop.warmup_seconds else "before"
    console.print(
        f"[yellow]The load ran out {when} the window, after {end:.3g} s: raise --num-requests.[/]",
        highlight=False,
    )


def today() -> str:
    """The date and time of a report, ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def progress_bar(
    console: Console, total: int, doing: str = "replaying"
) -> Iterator[Callable[[Progress], None]]:
    """A bar of finished requests with the tokens so far; yields the replay's callback. Shown on a
    terminal only."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=total, tokens=0)

        def show(progress: Progress) -> None:
            failed = f" [red]({progress.failed} failed)[/red]" if progress.failed else ""
            bar.update(
                task,
                description=f"{doing}{failed}",
                completed=progress.finished,
                tokens=progress.tokens,
            )

        yield show


def print_failures(console: Console, failures: Mapping[str, int]) -> None:
    """Each distinct error once, with how many requests it hit."""
    for message, count in failures.items():
        console.print(f"[red]{count} failed:[/red] {escape(message)}", soft_wrap=True)


@contextmanager
def _until_interrupted(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop` instead of ending the program."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
