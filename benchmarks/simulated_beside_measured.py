"""Whether the simulator says what this machine does: the same load, measured and simulated.

    python benchmarks/simulated_beside_measured.py [--requests 30] [--seconds 15] [--tries 1]

Needs no GPU: SmolLM2 on the C++ engine, which stands in for one. Serves a closed loop in which most
requests find no room on the GPU, measures a profile before and another one after that, as a shared
machine is now faster and now slower, and simulates the loop from either. Prints what was measured
beside the mean of what was simulated, and fails if output tokens a second are further apart than
10%, or P99 ITL than 25%. `--tries` says how often to begin anew where other work came between.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODEL = "smollm2"
ROOM = ("--gpu-kv-tokens", "4096", "--host-kv-size", "512MiB")
WITHIN = {"output tokens/s": 0.10, "ITL p99": 0.25}  # of what was measured; the rest is for show

Report = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--in-flight", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring a profile")
    parser.add_argument("--tries", type=int, default=1)
    args = parser.parse_args()
    load = ("--num-requests", str(args.requests), "--max-concurrency", str(args.in_flight))
    for number in range(1, args.tries + 1):
        with tempfile.TemporaryDirectory() as folder:
            measured, simulated = measure_and_simulate(Path(folder), load, args.seconds)
        if compare(measured, simulated):
            return
        print(f"further apart than that, try {number} of {args.tries}", flush=True)
    raise SystemExit(1)


def measure_and_simulate(
    folder: Path, load: tuple[str, ...], seconds: float
) -> tuple[Report, list[Report]]:
    """The report of what was served, and those of what each profile makes of it."""
    before, after, served = folder / "before", folder / "after", folder / "served.json"
    dualpace(before, "profile", "run", MODEL, *ROOM, "--seconds", seconds)
    dualpace(before, "bench", "offline", "--model", MODEL, *ROOM, *load, "--json", served)
    dualpace(after, "profile", "run", MODEL, *ROOM, "--seconds", seconds)
    simulated = []
    for cache in (before, after):
        [profile] = cache.glob("dualpace/profiles/*.json")
        report = cache / "simulated.json"
        dualpace(cache, "simulate", "--profile", profile, *load, "--json", report)
        simulated.append(json.loads(report.read_bytes()))
    return json.loads(served.read_bytes()), simulated


def dualpace(cache: Path, *arguments: object) -> None:
    """The command line, with its profiles in `cache`; what it says is shown if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "dualpace", *map(str, arguments)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"dualpace {' '.join(map(str, arguments))} failed:\n{done.stdout}")


def compare(measured: Report, simulated: list[Report]) -> bool:
    """Print both; true if they are as close as they have to be."""
    table = Table("", "measured", "simulated", "off by", title=measured["load"])
    predictions = [figures(report) for report in simulated]
    close = True
    for name, here in figures(measured).items():
        values = [prediction[name] for prediction in predictions]
        # A short load may give an engine nothing to do.
        known = [value for value in values if value is not None]
        there = statistics.fmean(known) if known else None
        off = there / here - 1.0 if here and there is not None else None
        close &= name not in WITHIN or (off is not None and abs(off) <= WITHIN[name])
        cells = ("none" if value is None else f"{value:.4g}" for value in (here, there))
        table.add_row(name, *cells, "" if off is None else f"{off:+.1%}")
    Console(width=100).print(table)
    return close


def figures(report: Report) -> dict[str, float | None]:
    """Tokens a second, and seconds; None where there were none."""
    return {
        "output tokens/s": report["output_tokens_per_s"],
        "of the CPU engine": report["tokens_by_engine"].get("cpu", 0) / report["duration_s"],
        "TTFT p50": report["ttft_s"]["p50"],
        "TTFT p99": report["ttft_s"]["p99"],
        "ITL p50": report["itl_s"]["p50"],
        "ITL p99": report["itl_s"]["p99"],
        "ITL p50, CPU engine": report["itl_by_engine_s"].get("cpu", {}).get("p50"),
    }


if __name__ == "__main__":
    main()
