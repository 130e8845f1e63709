"""Where an engine's time goes, from the timeline that it left (`--timeline FOLDER`).

    python benchmarks/timeline_gaps.py FOLDER/gpu.json [--after 30] [--before 60]

Prints, by what kind of step comes next, how long the device was idle before it, how long it took to
launch and to compute, and of the loop and the copies how many there were and how long they took.
Steps of one token a row count as decodes, others by how many tokens they have. `--after` and
`--before` are seconds from the first span.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Spans = list[dict[str, Any]]


def by_lane(spans: Spans, after: float, before: float) -> dict[str, Spans]:
    """Those within the window, in order, by lane; times in seconds from the first span."""
    origin = min(span["ts"] for span in spans)
    lanes: dict[str, Spans] = defaultdict(list)
    for span in sorted(spans, key=lambda span: float(span["ts"])):
        start, seconds = (span["ts"] - origin) * 1e-6, span["dur"] * 1e-6
        if after <= start <= before:
            lanes[span["tid"]].append({**span, "start": start, "end": start + seconds})
    return lanes


def kind_of(rows: int, tokens: int) -> int:
    """0 for decodes, else the power of two that a step's tokens go up to."""
    return 0 if rows == tokens else 2 ** (tokens - 1).bit_length()


def steps_by_kind(lanes: dict[str, Spans]) -> dict[int, dict[str, list[float]]]:
    """For each kind of step, milliseconds of its gap, launch, wait for the device and turn there.

    gap: from the end of the step before to when the device turns to this one, which is when its
    launch begins, if that is later; lead: from the begin of the launch to then.
    """
    kinds = {
        step["name"]: kind_of(step["args"]["rows"], step["args"]["tokens"])
        for step in lanes["steps"]
    }
    launches = {span["name"]: span for span in lanes["launch"]}
    times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    end = None
    for span in lanes["device"]:
        launch, kind = launches.get(span["name"]), kinds.get(span["name"])
        if launch is not None and kind is not None and end is not None:
            found = times[kind]
            found["gap"].append(max(0.0, span["start"] - end) * 1e3)
            found["lead"].append((span["start"] - launch["start"]) * 1e3)
            found["launch"].append((launch["end"] - launch["start"]) * 1e3)
            found["device"].append((span["end"] - span["start"]) * 1e3)
        end = span["end"]
    return times


def show(title: str, rows: dict[str, list[float]], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "count", "mean ms", "p50", "p90", "p99", "total s"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in rows.items():
        cuts = np.percentile(values, [50, 90, 99])
        figures = [f"{value:.2f}" for value in (np.mean(values), *cuts)]
        table.add_row(name, str(len(values)), *figures, f"{sum(values) * 1e-3:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--before", type=float, default=float("inf"))
    given = parser.parse_args()
    if not given.file.is_file():
        raise SystemExit(
            f"error: {given.file} is no file: an engine's is FOLDER/gpu.json or cpu.json"
        )
    spans = json.loads(given.file.read_text())["traceEvents"]
    if not spans:
        raise SystemExit(f"error: {given.file} has no spans")
    lanes = by_lane(spans, given.after, given.before)
    if not lanes:
        raise SystemExit("error: there are no spans between --after and --before")
    if "device" not in lanes:
        print("without a CUDA device nobody has noted when it was busy: no gaps")
    console = Console(width=100)
    for kind, times in sorted(steps_by_kind(lanes).items()):
        name = f"prompts, up to {kind} tokens" if kind else "decodes"
        show(f"{name}, milliseconds", times, console)
    rest: dict[str, list[float]] = defaultdict(list)
    for lane in ("loop", "copies", "launch", "steps"):
        for span in lanes[lane]:
            name = span["name"].split()[0]
            if lane == "launch" and name == "step":
                continue
            rest[f"{lane}: {name}"].append((span["end"] - span["start"]) * 1e3)
    show("all else, milliseconds", rest, console)


if __name__ == "__main__":
    main()
