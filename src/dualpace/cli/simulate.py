"""`dualpace simulate`: the server's own schedulers and policies on a profile's clock.

Chooses and composes; `dualpace.sim` runs, `dualpace.bench` measures. The table goes to stdout, and
one line of JSON last, both as from `dualpace bench serve` and marked as simulated.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from dualpace.bench.load import (
    AZURE_CONV_2023,
    LoadRequest,
    arrive_as_traced,
    arrive_at_once,
    arrive_poisson,
    clip_lengths,
    read_azure_csv,
)
from dualpace.bench.metrics import summarize
from dualpace.bench.report import Circumstances, report_dict, report_table
from dualpace.cli.errors import explained
from dualpace.core.config import EngineOptions, PolicyName
from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import TableCostModel
from dualpace.policy.registry import make_policy
from dualpace.profile.table import load as load_profile
from dualpace.sim.hardware import Durations
from dualpace.sim.replay import replay


def simulate(
    profile_file: Annotated[
        Path, typer.Argument(metavar="PROFILE.json", help="From `dualpace profile run`.")
    ],
    policy: Annotated[str, typer.Option(help="dualpace or gpu-only.")] = "dualpace",
    trace: Annotated[
        Path | None, typer.Option(help="Lengths and arrivals of an Azure LLM inference trace.")
    ] = None,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Log-normal lengths fitted to Azure-conv 2023 (default)."),
    ] = False,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 200,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Mean requests per second: the trace's arrivals compressed to it, else Poisson. "
            "(default: a trace's own arrivals, else all at once)"
        ),
    ] = math.inf,
    gpu_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV room on the GPU. (default: the profile's)")
    ] = None,
    host_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV room on the host. (default: the profile's)")
    ] = None,
    copy_gbps: Annotated[
        float, typer.Option(help="Bandwidth between GPU and host memory, 10⁹ bytes per second.")
    ] = 25.0,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and arrivals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON.")
    ] = None,
) -> None:
    """Run a load against a simulated server of the measured speed; print a table, and JSON last."""
    errors = Console(stderr=True)
    with explained(code=2):
        if trace and synthetic:
            raise ConfigError("--trace and --synthetic exclude each other")
        if json_file and not json_file.parent.is_dir():
            raise ConfigError(f"cannot write {json_file}: {json_file.parent} is not a folder")
        profile = load_profile(profile_file)
        options = EngineOptions(model=profile.model, policy=cast(PolicyName, policy))
        rules = make_policy(options.policy, options.max_num_seqs)
        page_tokens = profile.fingerprint.page_tokens
        gpu_room = profile.gpu_kv_tokens if gpu_kv_tokens is None else gpu_kv_tokens
        host_room = profile.host_kv_tokens if host_kv_tokens is None else host_kv_tokens
        gpu_pages = gpu_room // page_tokens
        host_pages = host_room // page_tokens if rules.uses_host else 0
        load, load_text = _build_load(trace, num_requests, request_rate, seed)
        room = max(gpu_pages, host_pages) * page_tokens
        if room < 2:
            raise ConfigError("there is no KV room: set --gpu-kv-tokens or --host-kv-tokens")
        load, clipped = clip_lengths(load, room)
        if clipped:
            load_text += f", {clipped} clipped to {room} tokens"
        load_text += f"; {policy}, KV room {gpu_pages * page_tokens} + {host_pages * page_tokens}"
        durations = Durations(
            TableCostModel(profile.points), profile.fingerprint.page_bytes, copy_gbps * 1e9
        )
        with errors.status(f"simulating {len(load)} requests"):
            hardware = durations.hardware(gpu_pages, host_pages, page_tokens)
            records = replay(load, hardware, rules)
    circumstances = Circumstances(
        model=f"{profile.model} (simulated)",
        base_url="",
        hardware=f"simulated {profile.fingerprint.hardware}",
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        load=load_text,
    )
    summary = summarize(records)
    table = report_table(circumstances, summary)
    table.caption = escape(
        f"simulated from a profile of {profile.date} on {profile.fingerprint.hardware}; "
        f"{durations.extrapolated} of {durations.steps} steps beyond what was measured"
    )
    report: dict[str, Any] = {
        "simulated": True,
        "policy": policy,
        "extrapolated_steps": durations.extrapolated,
        "steps": durations.steps,
        **report_dict(circumstances, summary),
    }
    line = json.dumps(report, allow_nan=False)
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")
    Console().print(table)
    typer.echo(line)
    if not summary.succeeded:
        raise typer.Exit(1)


def _build_load(
    trace: Path | None, num_requests: int, rate: float, seed: int
) -> tuple[list[LoadRequest], str]:
    """The requests, and one line that describes them."""
    timing = "" if math.isinf(rate) else f" at {rate:g}/s"
    if trace:
        load = arrive_as_traced(read_azure_csv(trace, num_requests), rate)
        return load, f"{len(load)} requests, {trace.name}, trace arrivals{timing}"
    load = AZURE_CONV_2023.generate(num_requests, seed)
    text = f"{len(load)} requests, log-normal lengths of Azure-conv 2023"
    if math.isinf(rate):
        return arrive_at_once(load), f"{text}, all at once"
    return arrive_poisson(load, rate, seed), f"{text}, Poisson{timing}"
