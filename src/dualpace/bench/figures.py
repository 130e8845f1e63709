"""Figures from reports: over time, over request rates, over the host's KV room, and of assists.

Each figure is drawn from the reports that have what it shows; what others lack is told.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpace.bench.drawing import (
    LINE_COLORS,
    add_legend,
    count_in_thousands,
    make_figure,
    save_figure,
    start_at_zero,
    use_log_scale,
)
from dualpace.bench.results import Result, describe_origins, make_lines

Drawn = Iterator[tuple[str, Any]]  # what is added to the figure's name, and the figure
FORMATS = ("svg", "png", "pdf")


@dataclass(frozen=True)
class Kind:
    """A figure's name, the keys of a report that it shows, and how it is drawn.

    unless: what is the case where reports have all keys and there is still nothing to draw.
    """

    name: str
    needs: tuple[str, ...]
    draw: Callable[[list[Result]], Drawn]
    of_assists: bool = False
    unless: str = ""


def draw_figures(
    results: Sequence[Result], folder: Path, suffix: str = "svg"
) -> tuple[list[Path], list[str]]:
    """Write every figure that `results` allow into `folder`; the files, and what was missing."""
    files: list[Path] = []
    missing: list[str] = []
    left_out: dict[str, tuple[list[str], list[str]]] = {}  # of which figures, for lack of what
    for kind in KINDS:
        able = []
        for result in (each for each in results if each.is_assist == kind.of_assists):
            lacks = [key for key in kind.needs if key not in result.report]
            if lacks:
                names, keys = left_out.setdefault(result.file, ([], []))
                names.append(kind.name)
                keys.extend(lacks)
            else:
                able.append(result)
        drawn = dict(kind.draw(able)) if able else {}
        if able and not drawn:
            missing.append(f"no {kind.name}: {kind.unless}")
        for addition, figure in drawn.items():
            path = folder / f"{'-'.join(filter(None, (kind.name, addition)))}.{suffix}"
            save_figure(figure, path)
            files.append(path)
    for file, parts in left_out.items():
        names, keys = (list(dict.fromkeys(part)) for part in parts)
        missing.append(f"{file} is left out of {', '.join(names)}: it lacks {', '.join(keys)}")
    return files, missing


def _by_load(results: list[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    """Results of the same model under the same load: a part of a file's name, a title, and they."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.report["model"], result.load), []).append(result)
    names: dict[str, int] = {}
    for (model, load), group in groups.items():
        rate = group[0].report["request_rate"]
        pace = "inf" if rate is None else f"{rate:g}"
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", model.rsplit("/", 1)[-1]).strip("-").lower()
        name = f"{slug}-{pace}"
        names[name] = names.get(name, 0) + 1
        yield name if names[name] == 1 else f"{name}-{names[name]}", f"{model}: {load}", group


def _cumulative(
    result: Result, engine: str | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Seconds at the ends of the time line's bins, from 0, and the tokens until then."""
    line = result.report["timeline"]
    by_engine = line["tokens_by_engine"]
    chosen = [bins for name, bins in by_engine.items() if engine in (None, name)]
    tokens = np.concatenate(([0], np.sum(chosen, axis=0, dtype=np.int64))) if chosen else [0]
    totals = np.cumsum(tokens)
    return line["bin_s"] * np.arange(len(totals)), totals


def _tokens_over_time(results: list[Result]) -> Drawn:
    for name, title, group in _by_load(results):
        figure, (axes,) = make_figure(title, describe_origins(group))
        lines = make_lines(group, along="date")
        for color, (label, line) in zip(_colors(lines), lines.items(), strict=True):
            for result in line:
                axes.plot(*_cumulative(result), color=color, label=label)
                times, tokens = _cumulative(result, "cpu")
                if tokens[-1]:
                    of_cpu = f"{label}: CPU engine"
                    axes.plot(times, tokens, color=color, linestyle="--", label=of_cpu)
        axes.set(xlabel="seconds since the first request", ylabel="output tokens, cumulative")
        count_in_thousands(axes.yaxis)
        add_legend(axes)
        yield name, figure


def _cpu_progress(results: list[Result]) -> Drawn:
    for name, title, group in _by_load(results):
        lines = make_lines([r for r in group if _cumulative(r, "cpu")[1][-1]], along="date")
        if not lines:
            continue
        shown = [*itertools.chain(*lines.values())]
        figure, (axes,) = make_figure(f"CPU engine, {title}", describe_origins(shown))
        for color, (label, line) in zip(_colors(lines), lines.items(), strict=True):
            for result in line:
                times, tokens = _cumulative(result, "cpu")
                axes.plot(times, tokens, color=color, label=label)
                gap = result.report["timeline"]["cpu_gap"]
                if gap is not None:
                    start, end = gap["start_s"], gap["end_s"]
                    note = f"longest gap {end - start:.2f} s"
                    axes.axvspan(start, end, color=color, alpha=0.25, linewidth=0, label=note)
        axes.set(
            xlabel="seconds since the first request", ylabel="tokens of the CPU engine, cumulative"
        )
        count_in_thousands(axes.yaxis)
        add_legend(axes)
        yield name, figure


def _lengths(results: list[Result]) -> Drawn:
    distinct = {str(result.report["lengths"]): result for result in results}
    figure, (axes,) = make_figure("Lengths of the requests", describe_origins([*distinct.values()]))
    share = np.linspace(0.0, 1.0, 101)
    for color, result in zip(_colors(distinct), distinct.values(), strict=True):
        source = result.report.get("source") or result.load
        for key, style in (("prompt_tokens", "-"), ("output_tokens", "--")):
            lengths = result.report["lengths"][key]
            if lengths:
                name = f"{source}: {key.partition('_')[0]}, median {lengths[50]:,}"
                axes.plot(lengths, share, color=color, linestyle=style, label=name)
    axes.set(xlabel="tokens", ylabel="share of requests up to this length")
    use_log_scale(axes.xaxis)
    add_legend(axes)
    yield "", figure


def _latency_by_rate(results: list[Result]) -> Drawn:
    paced = _paced(results)
    if not paced:
        return
    figure, (normalized, ttft, throughput) = make_figure(
        "Latency and throughput by request rate", describe_origins(paced), panels=3
    )
    lines = make_lines(paced, along="request_rate")
    for color, (label, line) in zip(_colors(lines), lines.items(), strict=True):
        _along_rates(normalized, line, ("normalized_latency_s", "mean"), color, label)
        _along_rates(ttft, line, ("ttft_s", "p50"), color, label)
        _along_rates(ttft, line, ("ttft_s", "p99"), color, label, "--")
        _along_rates(throughput, line, ("output_tokens_per_s",), color, label)
    normalized.set_ylabel("latency / output tokens, mean (s)")
    start_at_zero(normalized)
    ttft.set_ylabel("TTFT, median and p99 (dashed) (s)")
    use_log_scale(ttft.yaxis)
    throughput.set_ylabel("output tokens per second")
    start_at_zero(throughput)
    count_in_thousands(throughput.yaxis)
    for axes in (normalized, ttft, throughput):
        axes.set_xlabel("requests per second")
    add_legend(normalized)
    yield "", figure


def _itl_by_rate(results: list[Result]) -> Drawn:
    paced = _paced(results)
    if not paced:
        return
    figure, (axes,) = make_figure("Inter-token latency, p99, by load", describe_origins(paced))
    lines = make_lines(paced, along="request_rate")
    for color, (label, line) in zip(_colors(lines), lines.items(), strict=True):
        _along_rates(axes, line, ("itl_s", "p99"), color, label)
    axes.set(xlabel="requests per second", ylabel="p99 ITL (s)")
    use_log_scale(axes.yaxis)
    add_legend(axes)
    yield "", figure


def _throughput_by_host_kv(results: list[Result]) -> Drawn:
    for name, title, group in _by_load(results):
        lines = make_lines(group, along="host_kv_tokens")
        rooms = {label: {r.report["host_kv_tokens"] for r in line} for label, line in lines.items()}
        if all(len(room) == 1 for room in rooms.values()):
            continue
        # Lines of one room say nothing here, but for those without any: the others' measure.
        lines = {
            label: line
            for label, line in lines.items()
            if rooms[label] == {0} or len(rooms[label]) > 1
        }
        figure, (axes,) = make_figure(title, describe_origins([*itertools.chain(*lines.values())]))
        for color, (label, line) in zip(_colors(lines), lines.items(), strict=True):
            rates = [result.report["output_tokens_per_s"] for result in line]
            if rooms[label] == {0}:
                axes.axhline(rates[0], color=color, linestyle="--", label=label)
            else:
                x = [result.report["host_kv_tokens"] for result in line]
                axes.plot(x, rates, color=color, marker="o", label=label)
        axes.set(xlabel="KV room on the host (tokens)", ylabel="output tokens per second")
        start_at_zero(axes)
        count_in_thousands(axes.xaxis)
        count_in_thousands(axes.yaxis)
        add_legend(axes)
        yield name, figure


def _assisted_layer(results: list[Result]) -> Drawn:
    for index, result in enumerate(results):
        report = result.report
        work = {each["rows"]: each for each in report["work"]}
        alone = {each["rows"]: each["turn"] for each in report["turns"] if _is_alone(each)}
        turns = [each for each in report["turns"] if each["slots"] == 1]
        parts: dict[str, list[float]] = {
            "CPU attention": [each["attention"] for each in turns],
            "GPU dense work": [work[each["rows"]]["layer"] for each in turns],
            "copies": [work[each["rows"]]["copies"] for each in turns],
            "hand-over": [
                work[each["rows"]]["over"] - work[each["rows"]]["copies"] for each in turns
            ],
            "slower beside the GPU's own steps": [
                each["turn"] - alone[each["rows"]] for each in turns
            ],
        }
        figure, (axes,) = make_figure(
            f"{report['model']}: a layer of an assisted iteration", describe_origins([result])
        )
        bottom = np.zeros(len(turns))
        for color, (name, seconds) in zip(_colors(parts), parts.items(), strict=True):
            # A difference of two measurements may come out below zero; a bar cannot.
            heights = np.maximum(seconds, 0.0) * 1e3
            axes.bar(range(len(turns)), heights, bottom=bottom, color=color, label=name)
            bottom += heights
        axes.set_xticks(
            range(len(turns)),
            [f"{t['rows']} rows\n{t['attention'] * 1e3:g} ms\n{t['beside']}" for t in turns],
            fontsize=8,
        )
        axes.set(ylabel="milliseconds", xlabel="rows, attention of the CPU, the GPU's own steps")
        add_legend(axes)
        yield f"{index + 1}" if len(results) > 1 else "", figure


def _is_alone(turns: dict[str, Any]) -> bool:
    return bool(turns["beside"] == "nothing")


def _paced(results: list[Result]) -> list[Result]:
    return [result for result in results if result.report["request_rate"] is not None]


def _along_rates(
    axes: Any, line: list[Result], keys: tuple[str, ...], color: str, label: str, style: str = "-"
) -> None:
    """A line over the request rates, with a cross where requests failed."""
    points = []
    for result in line:
        value: Any = result.report
        for key in keys:
            value = value[key]
        if value is not None:
            points.append((result.report["request_rate"], value, bool(result.report["failed"])))
    if not points:
        return
    rates, values, failed = zip(*points, strict=True)
    axes.plot(rates, values, color=color, linestyle=style, marker="o", markersize=4, label=label)
    if any(failed):
        marked = [(rate, value) for rate, value, bad in points if bad]
        axes.scatter(*zip(*marked, strict=True), marker="x", s=60, color=color)


def _colors(lines: Any) -> list[str]:
    return [LINE_COLORS[index % len(LINE_COLORS)] for index in range(len(lines))]


NO_RATE = "no report is of a finite request rate"
KINDS = (
    Kind("tokens-over-time", ("timeline", "request_rate"), _tokens_over_time),
    Kind(
        "cpu-progress", ("timeline", "request_rate"), _cpu_progress,
        unless="no report has tokens of a CPU engine",
    ),
    Kind("latency-by-rate", ("request_rate",), _latency_by_rate, unless=NO_RATE),
    Kind("itl-by-rate", ("request_rate",), _itl_by_rate, unless=NO_RATE),
    Kind(
        "throughput-by-host-kv", ("host_kv_tokens", "request_rate"), _throughput_by_host_kv,
        unless="no two reports differ in host_kv_tokens only",
    ),
    Kind("lengths", ("lengths",), _lengths),
    Kind("assisted-layer", ("work", "turns"), _assisted_layer, of_assists=True),
)  # fmt: skip
