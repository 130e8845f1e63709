"""The comparison that offloading papers draw, on a simulated machine: throughput and latencies.

    python benchmarks/simulated_figures.py --trace AzureLLMInferenceTrace_conv.csv

One row for each policy and request rate: output rate, normalized latency, TTFT and ITL at their
tails, and the longest that a stream stood still; JSON last. `gated` counts NEO's 0.8 ms for a
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
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.view import Policy
from dualpace.profile.shipped import open_profile, shipped_names
from dualpace.profile.what_if import what_if
from dualpace.sim.machine import Machine

POLICIES = ("gpu-only", "gated", "gated-free", "dualpace-local", "dualpace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="rtx4090-llama-3.1-8b", help=f"{shipped_names()}")
    parser.add_argument("--what-if", default="", help="as of `dualpace simulate`")
    parser.add_argument("--trace", type=Path, help="Azure trace; default: log-normal lengths")
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--rates", default="2,2.5,3,3.5,inf", help="requests per second")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a GPU step")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    args = parser.parse_args()

    profile = what_if(open_profile(args.profile), args.what_if)
    if args.trace:
        lengths = read_azure_csv(args.trace, args.num_requests)
    else:
        lengths = AZURE_CONV_2023.generate(args.num_requests, seed=0)
    most = min(args.max_model_len, Machine(profile).largest_request("gated"))
    lengths, clipped = clip_lengths(lengths, most)
    results = [
        measure(profile, name, arriving(lengths, rate), args.max_tokens) | {"rate": rate}
        for rate in map(float, args.rates.split(","))
        for name in POLICIES
        if policy_of(Machine(profile), name) is not None
    ]
    console = Console(width=130)
    console.print(
        f"{profile.model} on {profile.fingerprint.hardware}, {profile.gpu_kv_tokens} tokens of GPU "
        f"KV; {len(lengths)} requests, {clipped} clipped to {most} tokens\n{profile.note}",
        markup=False, highlight=False,
    )  # fmt: skip
    console.print(table(results))
    report = {
        "simulated": True,
        "profile": args.profile,
        "profile_note": profile.note,
        "results": [row | {"rate": str(row["rate"])} for row in results],
    }
    line = json.dumps(report, allow_nan=False)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)


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


def measure(profile: Any, name: str, load: list[LoadRequest], max_tokens: int) -> dict[str, Any]:
    machine = Machine(profile)
    policy = policy_of(machine, name)
    assert policy is not None
    summary = summarize(machine.replay(load, policy, max_tokens)[0])
    assert not summary.failed, summary.failures
    return {
        "policy": name,
        "output_tok_s": summary.output_tokens_per_s,
        "normalized_latency_ms": 1e3 * (summary.normalized_latency_s.mean or 0.0),
        "latency_p99_s": summary.latency_s.p99,
        "ttft_p50_s": summary.ttft_s.p50,
        "ttft_p99_s": summary.ttft_s.p99,
        "itl_p50_ms": 1e3 * (summary.itl_s.p50 or 0.0),
        "itl_p99_ms": 1e3 * (summary.itl_s.p99 or 0.0),
        "stall_s": summary.itl_s.max,
    }


def table(results: list[dict[str, Any]]) -> Table:
    made = Table(title="simulated", title_justify="left")
    columns = {
        "rate": "req/s", "policy": "policy", "output_tok_s": "output tok/s",
        "normalized_latency_ms": "norm. ms/tok", "latency_p99_s": "latency p99 s",
        "ttft_p50_s": "TTFT p50 s", "ttft_p99_s": "p99", "itl_p50_ms": "ITL p50 ms",
        "itl_p99_ms": "p99", "stall_s": "longest s",
    }  # fmt: skip
    for field, title in columns.items():
        made.add_column(title, justify="left" if field == "policy" else "right")
    base = {row["rate"]: row["output_tok_s"] for row in results if row["policy"] == "gpu-only"}
    for row in results:
        cells = [row[f] if isinstance(row[f], str) else f"{row[f]:.3g}" for f in columns]
        cells[2] = f"{row['output_tok_s']:.0f} ({row['output_tok_s'] / base[row['rate']]:.2f}×)"
        made.add_row(*cells, end_section=row["policy"] == POLICIES[-1])
    return made


if __name__ == "__main__":
    main()
