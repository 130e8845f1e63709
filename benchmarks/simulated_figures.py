"""The comparison that offloading papers draw, on a simulated machine: throughput and latencies.

    python benchmarks/simulated_figures.py --trace AzureLLMInferenceTrace_conv.csv

One row for each policy, request rate and, with `--host-kv`, KV room on the host: output rate, what
of it the CPU attended for, normalized latency, TTFT and ITL at their tails, and the longest that a
stream stood still; JSON last, for `dualpace bench figures`. `gated` counts NEO's 0.8 ms for a
launch in each layer; `gated-free` counts none, which is the best that gating could be (neither is
charged for launches); `dualpace-local` has no help from the GPU. By default on a modelled RTX 4090
with a 12-core Xeon: ratios, not times, are what it can tell.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dualpace.bench.load import (
    AZURE_CONV_2023,
    LoadRequest,
    arrive_at_once,
    arrive_poisson,
    clip_lengths,
    read_azure_csv,
)
from dualpace.bench.metrics import summarize
from dualpace.bench.provenance import describe_version
from dualpace.bench.report import Circumstances, report_dict
from dualpace.cli.options import require_writable
from dualpace.cli.replays import today
from dualpace.core.errors import ConfigError, DualPaceError
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.view import Policy
from dualpace.profile.shipped import open_profile, shipped_names
from dualpace.profile.table import Profile
from dualpace.profile.what_if import what_if
from dualpace.sim.machine import Machine

POLICIES = ("gpu-only", "gated", "gated-free", "dualpace-local", "dualpace")
MAX_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="rtx4090-llama-3.1-8b", help=f"{shipped_names()}")
    parser.add_argument("--what-if", default="", help="as of `dualpace simulate`")
    parser.add_argument("--trace", type=Path, help="Azure trace; default: log-normal lengths")
    parser.add_argument("--num-requests", type=count, default=300)
    parser.add_argument(
        "--rates", type=rates, default="2,2.5,3,3.5,inf", help="requests per second"
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--host-kv", default="", help="rooms to compare, such as 8GiB,2x")
    parser.add_argument("--max-tokens", type=count, default=MAX_TOKENS, help="of a GPU step")
    parser.add_argument("--max-model-len", type=count, default=8192)
    parser.add_argument(
        "--json", default="", help="also write it here; with {policy} in it, a file for each"
    )
    args = parser.parse_args()
    policies = args.policies.split(",")
    if not set(policies) <= set(POLICIES):
        parser.error(f"--policies are {', '.join(POLICIES)}, got {args.policies}")
    try:
        run(args, policies)
    except DualPaceError as error:
        parser.error(str(error))


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def rates(text: str) -> list[float]:
    made = [float(rate) for rate in text.split(",")]
    if not all(rate > 0.0 for rate in made):
        raise ValueError
    return made


def run(args: argparse.Namespace, policies: list[str]) -> None:
    """Raises `DualPaceError` where the arguments cannot work, before anything is simulated."""
    files = {
        name: Path(args.json.replace("{policy}", name))
        for name in (policies if "{policy}" in args.json else [""])
        if args.json
    }
    require_writable(*files.values())
    profile = what_if(open_profile(args.profile), args.what_if)
    if args.trace:
        lengths, source = read_azure_csv(args.trace, args.num_requests), args.trace.name
    else:
        source = "log-normal lengths of Azure-conv 2023"
        lengths = AZURE_CONV_2023.generate(args.num_requests, seed=0)
    most = min(args.max_model_len, Machine(profile).largest_request("gated"))
    lengths, clipped = clip_lengths(lengths, most)
    machines = [
        (name, changed)
        for name in policies
        if policy_of(Machine(profile), name) is not None
        for changed in with_rooms(profile, args.host_kv.split(","), name)
    ]
    if not machines:
        raise ConfigError(f"the profile covers none of {', '.join(policies)}")
    results = [
        measure(changed, name, source, rate, lengths, args.max_tokens)
        for rate in args.rates
        for name, changed in machines
    ]
    console = Console(width=140)
    console.print(
        f"{profile.model} on {profile.fingerprint.hardware}, {profile.gpu_kv_tokens} tokens of GPU "
        f"KV; {len(lengths)} requests, {clipped} clipped to {most} tokens\n{profile.note}",
        markup=False, highlight=False,
    )  # fmt: skip
    console.print(table(results))
    for name, file in files.items():
        own = [each for each in results if name in ("", each["policy"])]
        file.write_text(as_json(own) + "\n")
    print(as_json(results))


def as_json(reports: list[dict[str, Any]]) -> str:
    return json.dumps({"sweep": shortened(reports)}, allow_nan=False, separators=(",", ":"))


def shortened(value: Any) -> Any:
    """To the microsecond: a sweep's digits beyond that are most of its size."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def with_rooms(profile: Profile, host_kv: list[str], name: str) -> list[Profile]:
    """The profile with each of these KV rooms on the host; once where the policy uses none."""
    rooms = host_kv[:1] if name == "gpu-only" else host_kv
    return [what_if(profile, f"host_kv={room}" if room else "") for room in rooms]


def arriving(lengths: list[LoadRequest], rate: float) -> list[LoadRequest]:
    return arrive_at_once(lengths) if math.isinf(rate) else arrive_poisson(lengths, rate, seed=0)


def policy_of(machine: Machine, name: str) -> Policy | None:
    """The policy of a column, or None if the profile does not cover it."""
    rules = machine.host_rules()
    if name == "gated":
        return machine.policy("gated", rules)
    if name == "gated-free":
        return GatedPolicy(rules.costs, machine.profile.fingerprint.num_layers, launch=0.0)
    if name == "gpu-only":
        return machine.policy("gpu-only")
    if name == "dualpace":
        return machine.policy("dualpace", rules)
    if not rules.costs.covers("cpu_iteration"):
        return None
    local = Machine(machine.profile, ("local",))
    return local.policy("dualpace", local.host_rules())


def measure(
    profile: Profile,
    name: str,
    source: str,
    rate: float,
    lengths: list[LoadRequest],
    max_tokens: int,
) -> dict[str, Any]:
    """A report as of `dualpace simulate`."""
    machine = Machine(profile)
    policy = policy_of(machine, name)
    assert policy is not None
    records, _ = machine.replay(arriving(lengths, rate), policy, max_tokens, whole_prompts=True)
    summary = summarize(records)
    assert not summary.failed, summary.failures
    timing = "all at once" if math.isinf(rate) else f"Poisson at {rate:g}/s"
    modelled = profile.note.startswith("MODELLED")  # no such machine was ever measured
    circumstances = Circumstances(
        model=f"{profile.model} (simulated)",
        base_url="",
        hardware=("a model of " if modelled else "") + profile.fingerprint.hardware,
        date=today(),
        load=f"{len(lengths)} requests, {source}, {timing}; {name}",
        version=describe_version(),
        label=name if max_tokens == MAX_TOKENS else f"{name}, steps of {max_tokens}",
        source=source,
        request_rate=None if math.isinf(rate) else rate,
        simulated=True,
    )
    rooms = {
        "gpu_kv_tokens": profile.gpu_kv_tokens,
        "host_kv_tokens": 0 if name == "gpu-only" else profile.host_kv_tokens,
    }
    return (
        {"policy": name, "profile_note": profile.note} | rooms | report_dict(circumstances, summary)
    )


def table(reports: list[dict[str, Any]]) -> Table:
    made = Table(title="simulated", title_justify="left")
    for title in (
        "req/s", "policy", "host KV", "output tok/s", "CPU", "norm. ms/tok", "latency p99 s",
        "TTFT p50 s", "p99", "ITL p50 ms", "p99", "longest s",
    ):  # fmt: skip
        made.add_column(title, justify="left" if title == "policy" else "right")
    base = {
        each["request_rate"]: each["output_tokens_per_s"]
        for each in reports
        if each["policy"] == "gpu-only"
    }
    for index, each in enumerate(reports):
        rate, output = each["request_rate"], each["output_tokens_per_s"]
        itl = each["itl_s"]
        times = (
            1e3 * each["normalized_latency_s"]["mean"], each["latency_s"]["p99"],
            each["ttft_s"]["p50"], each["ttft_s"]["p99"], 1e3 * itl["p50"], 1e3 * itl["p99"],
            itl["max"],
        )  # fmt: skip
        made.add_row(
            "inf" if rate is None else f"{rate:g}",
            each["policy"],
            f"{each['host_kv_tokens']:,}",
            f"{output:.0f}" + (f" ({output / base[rate]:.2f}×)" if rate in base else ""),
            f"{each['tokens_by_engine'].get('cpu', 0) / each['output_tokens']:.0%}",
            *(f"{value:.3g}" for value in times),
            end_section=each is reports[-1] or reports[index + 1]["request_rate"] != rate,
        )
    return made


if __name__ == "__main__":
    main()
