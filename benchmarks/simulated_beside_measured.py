"""Whether the simulator says what this machine does: the same load, measured and simulated.

    python benchmarks/simulated_beside_measured.py [--requests 30] [--seconds 15] [--tries 1]

Needs no GPU: SmolLM2 on the C++ engine, which stands in for one. Measures a profile, serves a
closed loop in which most requests find no room on the GPU, and simulates that loop from the
profile. Prints both and fails if output tokens a second are further apart than 10%, or P99 ITL than
25%. All of it is from the same minutes, but other work on the machine may come between: `--tries`
says how often to begin anew.
"""

from __future__ import annotations

import argparse
import json
import os
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
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring the profile")
    parser.add_argument("--tries", type=int, default=1)
    args = parser.parse_args()
    load = ("--num-requests", str(args.requests), "--max-concurrency", str(args.in_flight))
    for number in range(1, args.tries + 1):
        with tempfile.TemporaryDirectory() as folder:
            reports = measure_and_simulate(Path(folder), load, args.seconds)
        if compare(*reports):
            return
        print(f"further apart than that, try {number} of {args.tries}", flush=True)
    raise SystemExit(1)


def measure_and_simulate(
    folder: Path, load: tuple[str, ...], seconds: float
) -> tuple[Report, Report]:
    """The reports of both."""
    measured, simulated = folder / "measured.json", folder / "simulated.json"
    dualpace(folder, "profile", "run", MODEL, *ROOM, "--seconds", str(seconds))
    [profile] = folder.glob("dualpace/profiles/*.json")
    dualpace(folder, "bench", "offline", "--model", MODEL, *ROOM, *load, "--json", str(measured))
    dualpace(folder, "simulate", "--profile", str(profile), *load, "--json", str(simulated))
    return json.loads(measured.read_bytes()), json.loads(simulated.read_bytes())


def dualpace(cache: Path, *arguments: str) -> None:
    """The command line, with its profiles in `cache`; what it says is shown if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "dualpace", *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"dualpace {' '.join(arguments)} failed:\n{done.stdout}")


def compare(measured: Report, simulated: Report) -> bool:
    """Print both; true if they are as close as they have to be."""
    table = Table("", "measured", "simulated", "off by", title=measured["load"])
    close = True
    for (name, here), there in zip(
        figures(measured).items(), figures(simulated).values(), strict=True
    ):
        # A short load may give an engine nothing to do.
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
