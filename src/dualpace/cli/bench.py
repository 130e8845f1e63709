"""`dualpace bench serve`: replay a load against a running server and report what it did.

Chooses and composes; the work is done by the rooms of `dualpace.bench`. Progress goes to stderr,
the table to stdout, and one line of JSON last.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from dualpace.bench.client import Progress, ServedModel, ServerError, ask_models, replay
from dualpace.bench.hardware import describe_machine
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
from dualpace.bench.report import Circumstances, report_dict, report_table, write_csv
from dualpace.cli.bench_kernels import kernels
from dualpace.cli.errors import explained
from dualpace.core.errors import ConfigError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")

bench_app = typer.Typer(
    help="Measure a server, or the CPU kernels of this machine.",
    no_args_is_help=True,
    add_completion=False,
)


class Arrival(StrEnum):
    """When requests are sent."""

    inf = "inf"
    poisson = "poisson"
    trace = "trace"


bench_app.command()(kernels)


@bench_app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for. (default: the server's first)")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Lengths and arrivals of an Azure LLM inference trace (CSV, published at "
            "github.com/Azure/AzurePublicDataset), from its first row."
        ),
    ] = None,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Log-normal lengths fitted to Azure-conv 2023 (default)."),
    ] = False,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 200,
    request_rate: Annotated[float, typer.Option(help="Mean requests per second.")] = math.inf,
    arrival: Annotated[
        Arrival | None,
        typer.Option(
            help="inf: all at once; poisson: at --request-rate; trace: the trace's own, compressed "
            "to --request-rate. (default: poisson if there is a rate, else inf)"
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests in flight. (default: no limit)")
    ] = None,
    scale: Annotated[float, typer.Option(help="Multiply all lengths, for small models.")] = 1.0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Clip requests to so many tokens. (default: what /v1/models tells)"
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=2, help="Prompts are random token ids below this.")
    ] = 32000,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and prompts.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a byte after which a request failed.")
    ] = 600.0,
    hardware: Annotated[
        str | None,
        typer.Option(help="Named in report and plot. (default: this machine if the URL is local)"),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write a line for each request.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write the figure of tokens over time (PNG).")
    ] = None,
) -> None:
    """Replay a load against /v1/completions; print a table, and a JSON line last.

    Exits with 1 if no request succeeded.
    """
    errors = Console(stderr=True)
    with explained(code=2):
        if trace and synthetic:
            raise ConfigError("--trace and --synthetic exclude each other")
        _require_folders(json_file, csv_file, plot_file)
        served = _choose_model(base_url, model)
        load, load_text = _build_load(trace, num_requests, request_rate, arrival, scale, seed)
        limit = max_model_len or served.max_model_len
        if limit:
            load, clipped = clip_lengths(load, limit)
            if clipped:
                load_text += f", {clipped} clipped to {limit} tokens"
        prompts = draw_prompts(load, vocab_size, seed)
        circumstances = Circumstances(
            model=served.id,
            base_url=base_url,
            hardware=hardware or _hardware_of(base_url),
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            load=load_text,
        )
        with progress_bar(errors, len(load)) as bar:
            records = asyncio.run(
                replay(
                    base_url,
                    served.id,
                    load,
                    prompts,
                    max_concurrency=max_concurrency,
                    silence_timeout_s=timeout,
                    on_progress=bar,
                )
            )
    summary = summarize(records)
    line = json.dumps(report_dict(circumstances, summary), allow_nan=False)
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")
    if csv_file:
        write_csv(csv_file, records)
    if plot_file:
        plot_tokens(plot_file, records, circumstances)
    print_failures(errors, summary.failures)
    Console().print(report_table(circumstances, summary))
    typer.echo(line)
    if not summary.succeeded:
        raise typer.Exit(1)


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


def _choose_model(base_url: str, model: str | None) -> ServedModel:
    """The server's first model, or the named one with what the server tells about it."""
    offered = ask_models(base_url)
    if model is None:
        if not offered:
            raise ServerError(f"{base_url} lists no model: name one with --model")
        return offered[0]
    return next((card for card in offered if card.id == model), ServedModel(model, None))


def _build_load(
    trace: Path | None,
    num_requests: int,
    rate: float,
    arrival: Arrival | None,
    scale: float,
    seed: int,
) -> tuple[list[LoadRequest], str]:
    """The requests, and one line that describes them."""
    if not (math.isfinite(scale) and scale > 0.0):
        raise ConfigError(f"--scale must be a positive number, got {scale}")
    if arrival is None:
        arrival = Arrival.inf if math.isinf(rate) else Arrival.poisson
    if trace:
        load = scale_lengths(read_azure_csv(trace, num_requests), scale)
        source = trace.name
    else:
        load = AZURE_CONV_2023.scaled(scale, scale).generate(num_requests, seed)
        source = "log-normal lengths of Azure-conv 2023"
    if arrival is Arrival.inf:
        if math.isfinite(rate):
            raise ConfigError("--arrival inf sends all at once: leave --request-rate out")
        load, timing = arrive_at_once(load), "all at once"
    elif arrival is Arrival.poisson:
        load, timing = arrive_poisson(load, rate, seed), f"Poisson at {rate:g}/s"
    elif trace:
        load = arrive_as_traced(load, rate)
        timing = "trace arrivals" + ("" if math.isinf(rate) else f" at {rate:g}/s")
    else:
        raise ConfigError("--arrival trace needs --trace FILE")
    scaled = "" if scale == 1.0 else f" × {scale:g}"
    return load, f"{len(load)} requests, {source}{scaled}, {timing}"


def _hardware_of(base_url: str) -> str:
    local = urlsplit(base_url).hostname in LOCAL_HOSTS
    return describe_machine() if local else "hardware not stated"


def _require_folders(*files: Path | None) -> None:
    """Fail before the replay, not after it, where a result could not be written."""
    for file in files:
        if file and not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: {file.parent} is not a folder")
