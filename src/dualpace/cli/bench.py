"""`dualpace bench`: `serve` replays a load against a running server and reports what it did.

Chooses and composes; what the replays share is in `cli.load_flags`, `cli.replays`, `cli.reports`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from dualpace.bench.client import ServedModel, ServerError, ask_models
from dualpace.bench.clients import Clients, default_clients
from dualpace.bench.hardware import describe_machine
from dualpace.bench.provenance import describe_version
from dualpace.bench.report import Circumstances
from dualpace.cli.bench_assist import assist
from dualpace.cli.bench_figures import figures
from dualpace.cli.bench_kernels import kernels
from dualpace.cli.bench_offline import offline
from dualpace.cli.errors import explained
from dualpace.cli.load_flags import LoadFlags
from dualpace.cli.options import takes_options
from dualpace.cli.replays import Measurement, PaceFlags, today
from dualpace.cli.reports import Hardware, Outcome, ReportFlags, publish

MAX_VOCABULARY = 2**31 - 1  # token ids are 32-bit numbers everywhere
TOO_BUSY = 0.7  # part of the time for which a client may work before it is part of the measurement
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")

bench_app = typer.Typer(
    help="Measure a server, the engines without one, CPU kernels, or GPU Dense Assist; draw it.",
    no_args_is_help=True,
    add_completion=False,
)


@bench_app.command()
@takes_options
def serve(
    load_flags: LoadFlags,
    pace: PaceFlags,
    files: ReportFlags,
    base_url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for. (default: the server's first)")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Clip requests to so many tokens. (default: what /v1/models tells)"
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(min=2, max=MAX_VOCABULARY, help="Prompts are random token ids below this."),
    ] = 32000,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a byte after which a request failed.")
    ] = 600.0,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Client processes. (default: by the load and this machine)"),
    ] = None,
    hardware: Hardware = None,
) -> None:
    """Replay a load against /v1/completions; print a table, and a JSON line last.

    --max-concurrency is divided among the client processes.

    Exits with 1 if no request succeeded. Ctrl-C ends the replay and reports what there is.
    """
    errors = Console(stderr=True)
    with explained():
        loads = load_flags.build()
        files.check(loads)
        pace.check()
        served = _choose_model(base_url, model)
        limit = max_model_len or served.max_model_len
        outcomes: list[Outcome] = []
        for load in loads:
            if limit:
                load = load.clipped(limit)
            count = clients or default_clients(load.requests)
            sender = Clients(count, base_url, served.id, silence_timeout_s=timeout)
            circumstances = Circumstances(
                model=served.id,
                base_url=base_url,
                hardware=hardware or _hardware_of(base_url),
                date=today(),
                load=load.text + pace.text,
                version=describe_version(),
                label=files.label,
                source=load.source,
                request_rate=load.request_rate,
            )
            measurement = Measurement(load, pace, vocab_size, load_flags.seed)
            asyncio.run(measurement.run(sender, errors))
            if sender.busiest > TOO_BUSY:
                errors.print(
                    f"[yellow]The client was busy for {sender.busiest:.0%} of the time and is "
                    "part of what was measured: raise --clients.[/]"
                )
            extra = {"clients": sender.worked, "client_busy": sender.busiest}
            outcomes.append(Outcome(circumstances, measurement.records, measurement.window, extra))
            if measurement.interrupted:
                break
        publish(
            outcomes,
            files,
            errors,
            is_sweep=len(loads) > 1,
            interrupted=measurement.interrupted,
        )


bench_app.command()(offline)
bench_app.command()(kernels)
bench_app.command()(assist)
bench_app.command()(figures)


def _choose_model(base_url: str, model: str | None) -> ServedModel:
    """The server's first model, or the named one with what the server tells about it."""
    offered = ask_models(base_url)
    if model is None:
        if not offered:
            raise ServerError(f"{base_url} lists no model: name one with --model")
        return offered[0]
    return next((card for card in offered if card.id == model), ServedModel(model, None))


def _hardware_of(base_url: str) -> str:
    local = urlsplit(base_url).hostname in LOCAL_HOSTS
    return describe_machine() if local else "hardware not stated"
