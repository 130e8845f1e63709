"""`dualpace simulate`: the server's own schedulers and policies on a profile's clock.

Chooses and composes; `dualpace.sim` runs, `dualpace.bench` measures. The table goes to stdout, and
one line of JSON last, both as from `dualpace bench serve` and marked as simulated.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from dualpace.bench.provenance import describe_version
from dualpace.bench.report import Circumstances
from dualpace.cli.errors import explained
from dualpace.cli.load_flags import LoadFlags
from dualpace.cli.options import takes_options
from dualpace.cli.replays import LoopFlags, progress_bar, today, warn_if_ran_out
from dualpace.cli.reports import Outcome, ReportFlags, publish
from dualpace.core.config import EngineOptions, PolicyName
from dualpace.core.errors import ConfigError
from dualpace.core.plan import ROUTES
from dualpace.policy.host import HostRules
from dualpace.profile.shipped import open_profile, shipped_names
from dualpace.profile.what_if import what_if
from dualpace.resolution import BATCHED_TOKENS
from dualpace.sim.machine import Machine


@takes_options
def simulate(
    profile_name: Annotated[
        str,
        typer.Option(
            "--profile",
            help="A .json file from `dualpace profile run`, or one that comes along: "
            + ", ".join(shipped_names()),
        ),
    ],
    load_flags: LoadFlags,
    loop: LoopFlags,
    files: ReportFlags,
    policy: Annotated[
        str, typer.Option(help="dualpace, gpu-only, or gated (NEO's published scheduling).")
    ] = "dualpace",
    changes: Annotated[
        str,
        typer.Option(
            "--what-if",
            help="Another machine: host_bandwidth=2x, gpu_bandwidth, gpu_flops, copy_bandwidth, "
            "gpu_kv=48GiB, host_kv=2x; several with commas.",
        ),
    ] = "",
    gpu_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV room on the GPU. (default: the profile's)")
    ] = None,
    host_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV room on the host. (default: the profile's)")
    ] = None,
    copy_gbps: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth between GPU and host memory, 10⁹ bytes per second. "
            "(default: the profile's)"
        ),
    ] = None,
    cpu_itl_target: Annotated[
        float | None,
        typer.Option(help="Seconds a token may take on the CPU engine. (default: the profile's)"),
    ] = None,
    gpu_itl_target: Annotated[
        float | None,
        typer.Option(
            help="Seconds a GPU step with decodes may take. (default: what a full one takes "
            "without the CPU engine; a tenth more is let pass)"
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens in one GPU step. (default: the server's there)"),
    ] = None,
    assist: Annotated[
        bool, typer.Option(help="Let the GPU do dense work for the CPU engine where that pays.")
    ] = True,
) -> None:
    """Run a load against a simulated server of the measured speed; print a table, and JSON last.

    Ctrl-C reports the rates of a sweep that are done.
    """
    errors = Console(stderr=True)
    with explained():
        loads = load_flags.build()
        files.check(loads)
        loop.check()
        # What the server's options may be is the server's to say.
        asked = EngineOptions(
            model=profile_name,
            policy=policy,  # type: ignore[arg-type]  # its values are checked
            cpu_itl_target=cpu_itl_target,
            gpu_itl_target=gpu_itl_target,
        )
        if copy_gbps is not None and not 0.0 < copy_gbps < math.inf:
            raise ConfigError(f"--copy-gbps must be a positive number, got {copy_gbps}")
        given = {
            "gpu_kv_tokens": gpu_kv_tokens,
            "host_kv_tokens": host_kv_tokens,
            "copy_bandwidth": None if copy_gbps is None else copy_gbps * 1e9,
        }
        profile = msgspec.structs.replace(
            what_if(open_profile(profile_name), changes),
            **{field: value for field, value in given.items() if value is not None},
        )
        machine = Machine(profile, ROUTES if assist else ("local",))
        name, rules = _settle(machine, asked, errors)
        room = machine.largest_request(name)
        if room < 2:
            rooms = "--gpu-kv-tokens" + (" or --host-kv-tokens" if policy == "dualpace" else "")
            raise ConfigError(f"there is no KV room for a request: set {rooms}")
        loads = [load.clipped(room) for load in loads]
        page_tokens = profile.fingerprint.page_tokens
        gpu_tokens = machine.gpu_pages * page_tokens
        host_tokens = 0 if name == "gpu-only" else machine.host_pages * page_tokens
        device = profile.fingerprint.device_kind
        step_tokens = max_num_batched_tokens or BATCHED_TOKENS[device]
        outcomes: list[Outcome] = []
        interrupted = False
        for load in loads:
            try:
                with progress_bar(errors, len(load.requests), "simulating") as bar:
                    records, durations = machine.replay(
                        load.requests,
                        machine.policy(name, rules, gpu_itl_target),
                        step_tokens,
                        max_concurrency=loop.max_concurrency,
                        seconds=loop.seconds,
                        on_progress=bar,
                    )
            except KeyboardInterrupt:
                interrupted = True
                break
            warn_if_ran_out(records, len(load.requests), loop, errors)
            circumstances = Circumstances(
                model=f"{profile.model} (simulated)",
                base_url="",
                hardware=profile.fingerprint.hardware,
                date=today(),
                load=f"{load.text}{loop.text}; {name}, KV room {gpu_tokens} + {host_tokens}",
                version=describe_version(),
                label=files.label or policy,
                source=load.source,
                request_rate=load.request_rate,
                simulated=True,
            )
            extra = {
                "policy": name,
                "gpu_kv_tokens": gpu_tokens,
                "host_kv_tokens": host_tokens,
                "profile_note": profile.note,
                "extrapolated_steps": durations.extrapolated,
                "steps": durations.steps,
            }
            caption = (
                f"simulated from a profile of {profile.date} on {profile.fingerprint.hardware}; "
                f"{durations.extrapolated} of {durations.steps} steps beyond what was measured"
                + (f"\n{profile.note}" if profile.note else "")
            )
            outcomes.append(Outcome(circumstances, records, loop.window, extra, caption))
        publish(outcomes, files, errors, is_sweep=len(loads) > 1, interrupted=interrupted)


def _settle(
    machine: Machine, asked: EngineOptions, console: Console
) -> tuple[PolicyName, HostRules | None]:
    """The policy that a server would have on this machine: `dualpace` without a host that helps is
    `gpu-only`. And what bounds the host under `dualpace`."""
    if asked.policy != "dualpace":
        return asked.policy, None
    if not machine.host_pages:
        return "gpu-only", None
    rules = machine.host_rules(asked.cpu_itl_target)
    console.print(f"CPU ITL target {rules.cpu_itl_target:.2f} s")
    reason = machine.why_no_help(rules)
    if reason is not None:
        console.print(f"the host cannot help: {reason}; as gpu-only", markup=False)
        return "gpu-only", None
    return "dualpace", rules
