"""`dualpace simulate`: the server's own schedulers and policies on a profile's clock.

Chooses and composes; `dualpace.sim` runs, `dualpace.bench` measures. The table goes to stdout, and
one line of JSON last, both as from `dualpace bench serve` and marked as simulated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from dualpace.bench.metrics import summarize
from dualpace.bench.report import Circumstances, report_dict, report_table
from dualpace.cli.errors import explained
from dualpace.cli.options import JsonFile, require_folders, takes_options
from dualpace.cli.replays import LoadFlags, today
from dualpace.core.config import EngineOptions, PolicyName
from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import TableCostModel
from dualpace.policy.registry import make_policy
from dualpace.profile.table import load as load_profile
from dualpace.sim.hardware import Durations
from dualpace.sim.replay import replay


@takes_options
def simulate(
    profile_file: Annotated[
        Path, typer.Argument(metavar="PROFILE.json", help="From `dualpace profile run`.")
    ],
    load_flags: LoadFlags,
    policy: Annotated[str, typer.Option(help="dualpace or gpu-only.")] = "dualpace",
    gpu_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV room on the GPU. (default: the profile's)")
    ] = None,
    host_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV room on the host. (default: the profile's)")
    ] = None,
    copy_gbps: Annotated[
        float, typer.Option(help="Bandwidth between GPU and host memory, 10⁹ bytes per second.")
    ] = 25.0,
    json_file: JsonFile = None,
) -> None:
    """Run a load against a simulated server of the measured speed; print a table, and JSON last."""
    errors = Console(stderr=True)
    with explained(code=2):
        require_folders(json_file)
        load = load_flags.build()
        profile = load_profile(profile_file)
        options = EngineOptions(model=profile.model, policy=cast(PolicyName, policy))
        rules = make_policy(options.policy, options.max_num_seqs)
        page_tokens = profile.fingerprint.page_tokens
        gpu_room = profile.gpu_kv_tokens if gpu_kv_tokens is None else gpu_kv_tokens
        host_room = profile.host_kv_tokens if host_kv_tokens is None else host_kv_tokens
        gpu_pages = gpu_room // page_tokens
        host_pages = host_room // page_tokens if rules.uses_host else 0
        room = max(gpu_pages, host_pages) * page_tokens
        if room < 2:
            raise ConfigError("there is no KV room: set --gpu-kv-tokens or --host-kv-tokens")
        load = load.clipped(room)
        rooms = f"KV room {gpu_pages * page_tokens} + {host_pages * page_tokens}"
        durations = Durations(
            TableCostModel(profile.points), profile.fingerprint.page_bytes, copy_gbps * 1e9
        )
        with errors.status(f"simulating {len(load.requests)} requests"):
            hardware = durations.hardware(gpu_pages, host_pages, page_tokens)
            records = replay(load.requests, hardware, rules)
    circumstances = Circumstances(
        model=f"{profile.model} (simulated)",
        base_url="",
        hardware=f"simulated {profile.fingerprint.hardware}",
        date=today(),
        load=f"{load.text}; {policy}, {rooms}",
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
