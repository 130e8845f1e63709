"""What the commands that replay a load share: its options, the progress bar, the report.

Chooses and shows; the work is done by the rooms of `dualpace.bench`. Progress goes to stderr, the
table to stdout, and one line of JSON last.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from dualpace.bench.load import (
    AZURE_CONV_2023,
    LoadRequest,
    arrive_as_traced,
    arrive_at_once,
    arrive_poisson,
    clip_lengths,
    draw_prompts,
    read_azure_csv,
    scale_lengths,
)
from dualpace.bench.metrics import summarize
from dualpace.bench.plots import plot_tokens
from dualpace.bench.record import RequestRecord
from dualpace.bench.replay import Progress
from dualpace.bench.report import Circumstances, report_dict, report_table, write_csv
from dualpace.cli.options import JsonFile, require_folders
from dualpace.core.errors import ConfigError

INTERRUPTED = 130  # exit code after Ctrl-C


class Arrival(StrEnum):
    """When requests are sent."""

    inf = "inf"
    poisson = "poisson"
    trace = "trace"


@dataclass(frozen=True)
class Load:
    """Requests, and one line that describes them."""

    requests: list[LoadRequest]
    text: str

    def clipped(self, max_model_len: int) -> Load:
        """The load with its requests cut to so many tokens of prompt and output."""
        requests, count = clip_lengths(self.requests, max_model_len)
        note = f", {count} clipped to {max_model_len} tokens" if count else ""
        return Load(requests, self.text + note)


@dataclass(frozen=True)
class LoadFlags:
    """What is asked of the server."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="Lengths and arrivals of an Azure LLM inference trace (CSV, published at "
            "github.com/Azure/AzurePublicDataset), from its first row."
        ),
    ] = None
    skip_longer: Annotated[
        int | None,
        typer.Option(min=2, help="Leave out rows of the trace with more tokens than that."),
    ] = None
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Log-normal lengths fitted to Azure-conv 2023 (default)."),
    ] = False
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 200
    request_rate: Annotated[float, typer.Option(help="Mean requests per second.")] = math.inf
    arrival: Annotated[
        Arrival | None,
        typer.Option(
            help="inf: all at once; poisson: at --request-rate; trace: the trace's own, compressed "
            "to --request-rate. (default: poisson if there is a rate, else inf)"
        ),
    ] = None
    scale: Annotated[float, typer.Option(help="Multiply all lengths, for small models.")] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and prompts.")] = 0

    def build(self) -> Load:
        """Raises `ConfigError` naming the flag that cannot work."""
        if self.trace and self.synthetic:
            raise ConfigError("--trace and --synthetic exclude each other")
        if self.skip_longer is not None and not self.trace:
            raise ConfigError("--skip-longer needs --trace FILE")
        if not (math.isfinite(self.scale) and self.scale > 0.0):
            raise ConfigError(f"--scale must be a positive number, got {self.scale}")
        if self.trace:
            rows = read_azure_csv(self.trace, self.num_requests, self.skip_longer)
            load = scale_lengths(rows, self.scale)
            source = self.trace.name
            if self.skip_longer is not None:
                source += f" up to {self.skip_longer} tokens"
        else:
            lengths = AZURE_CONV_2023.scaled(self.scale, self.scale)
            load = lengths.generate(self.num_requests, self.seed)
            source = "log-normal lengths of Azure-conv 2023"
        load, timing = self._arrive(load)
        scaled = "" if self.scale == 1.0 else f" × {self.scale:g}"
        return Load(load, f"{len(load)} requests, {source}{scaled}, {timing}")

    def _arrive(self, load: list[LoadRequest]) -> tuple[list[LoadRequest], str]:
        rate = self.request_rate
        arrival = self.arrival or (Arrival.inf if math.isinf(rate) else Arrival.poisson)
        if arrival is Arrival.inf:
            if math.isfinite(rate):
                raise ConfigError("--arrival inf sends all at once: leave --request-rate out")
            return arrive_at_once(load), "all at once"
        if arrival is Arrival.poisson:
            return arrive_poisson(load, rate, self.seed), f"Poisson at {rate:g}/s"
        if not self.trace:
            raise ConfigError("--arrival trace needs --trace FILE")
        timing = "trace arrivals" + ("" if math.isinf(rate) else f" at {rate:g}/s")
        return arrive_as_traced(load, rate), timing


@dataclass(frozen=True)
class PaceFlags:
    """How it is asked, and how long."""

    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests in flight. (default: no limit)")
    ] = None
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests sent beforehand, which are not counted.")
    ] = 1
    duration: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Measure a window of so many seconds, then stop. (default: until all is answered)",
        ),
    ] = None
    warmup_seconds: Annotated[
        float, typer.Option(min=0.0, help="When the window of --duration begins.")
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
        """What there is to tell of it, beginning with a comma."""
        limit = f", at most {self.max_concurrency} in flight" if self.max_concurrency else ""
        if self.duration is None:
            return limit
        return f"{limit}, {self.duration:g} s after {self.warmup_seconds:g} s of warm-up"


@dataclass(frozen=True)
class ReportFlags:
    """What is written, and what is named in it."""

    hardware: Annotated[
        str | None,
        typer.Option(help="Named in report and plot. (default: this machine, if it is the server)"),
    ] = None
    json_file: JsonFile = None
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write a line for each request.")
    ] = None
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write the figure of tokens over time (PNG).")
    ] = None

    def check(self) -> None:
        """Raises `ConfigError` where a file could not be written."""
        require_folders(self.json_file, self.csv_file, self.plot_file)


class Sender(Protocol):
    """`bench.replay.replay` with the prompts to send."""

    def __call__(
        self,
        load: Sequence[LoadRequest],
        prompts: Sequence[list[int]],
        *,
        max_concurrency: int | None = None,
        seconds: float | None = None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
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
        """Warm up, then replay. Ctrl-C ends the replay with what it has."""
        load = self.load.requests
        warmups = arrive_at_once(load[: self.pace.num_warmups])
        prompts = draw_prompts([*load, *warmups], self.vocab_size, self.seed)
        if warmups:
            with console.status("warming up"):
                await send(warmups, prompts[len(load) :])
        stop = asyncio.Event()
        with progress_bar(console, len(load)) as bar, _until_interrupted(stop):
            self.records = await send(
                load,
                prompts[: len(load)],
                max_concurrency=self.pace.max_concurrency,
                seconds=self.pace.seconds,
                stop=stop,
                on_progress=bar,
            )
        self.interrupted = stop.is_set()

    @property
    def window(self) -> tuple[float, float] | None:
        """The seconds to look at closer: of a replay that was cut off, or had to be."""
        if self.pace.duration is None and not self.interrupted:
            return None
        end = max((record.end_s for record in self.records), default=0.0)
        return min(self.pace.warmup_seconds, end), end

    def report(
        self,
        circumstances: Circumstances,
        files: ReportFlags,
        console: Console,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the files and print the table, then the line of JSON, which begins with `extra`.

        Exits with 130 after Ctrl-C, with 1 where no request succeeded.
        """
        summary = summarize(self.records, self.window)
        report = {**(extra or {}), **report_dict(circumstances, summary)}
        line = json.dumps(report, allow_nan=False)
        if files.json_file:
            files.json_file.write_text(line + "\n", encoding="utf-8")
        if files.csv_file:
            write_csv(files.csv_file, self.records)
        if files.plot_file:
            plot_tokens(files.plot_file, self.records, circumstances)
        print_failures(console, summary.failures)
        if (
            self.pace.seconds
            and len(self.records) == len(self.load.requests)
            and not summary.unfinished
        ):
            console.print("[yellow]The load ran out in the window: raise --num-requests.[/]")
        Console().print(report_table(circumstances, summary))
        typer.echo(line)
        if self.interrupted:
            raise typer.Exit(INTERRUPTED)
        if not summary.succeeded:
            raise typer.Exit(1)


def today() -> str:
    """The date and time of a report, ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar of finished requests with the tokens so far; yields the replay's callback."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replaying", total=total, tokens=0)

        def show(progress: Progress) -> None:
            failed = f" [red]({progress.failed} failed)[/red]" if progress.failed else ""
            bar.update(
                task,
                description=f"replaying{failed}",
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
