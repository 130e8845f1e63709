"""A replay's summary for people (a rich table) and for programs (one JSON-able dict, a CSV).

Computes nothing: the numbers are `metrics`'.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dualpace.bench.metrics import Distribution, Summary, WindowSummary, tokens_by_engine
from dualpace.bench.record import UNREPORTED, RequestRecord

CSV_COLUMNS = (
    "request_rate", "index", "arrival_s", "sent_s", "end_s", "prompt_tokens", "requested_tokens",
    "output_tokens", "gpu_tokens", "cpu_tokens", "ttft_s", "tpot_s", "latency_s",
    "finish_reason", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a number is worth nothing without: what was measured, on what, when, under which load.

    `date` is ISO 8601; `hardware`, `load` and `version` (of DualPace, with its commit) are free
    text. `label` names what was compared, a policy or another server; `source` is where the lengths
    come from; `request_rate` is in requests per second, None where all came at once or as traced.
    """

    model: str
    base_url: str
    hardware: str
    date: str
    load: str
    version: str
    label: str | None = None
    source: str | None = None
    request_rate: float | None = None
    simulated: bool = False

    @property
    def origin(self) -> str:
        """ "measured DATE on HARDWARE, DualPace VERSION", or "simulated …"."""
        verb = "simulated" if self.simulated else "measured"
        return f"{verb} {self.date} on {self.hardware}, DualPace {self.version}"


def report_dict(circumstances: Circumstances, summary: Summary) -> dict[str, Any]:
    """Circumstances and summary in one dict of plain JSON values."""
    return asdict(circumstances) | summary.to_dict()


def report_table(circumstances: Circumstances, summary: Summary) -> Table:
    """Counts, throughput, tokens by engine, and the latencies with their percentiles."""
    table = Table(
        title=escape(f"{circumstances.model}: {circumstances.load}"),
        caption=escape(f"{circumstances.origin}; times from the real send"),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")

    table.add_row("requests", f"{summary.succeeded} of {summary.requests}")
    if summary.failed:
        text = f"[red]{summary.failed}[/red] (after {summary.failed_tokens} tokens)"
        table.add_row("failed", text)
    if summary.unfinished:
        text = f"[yellow]{summary.unfinished}[/] (after {summary.unfinished_tokens} tokens)"
        table.add_row("unfinished", text)
    if summary.wrong_length:
        table.add_row("wrong length", f"[yellow]{summary.wrong_length}[/]")
    if summary.estimated:
        table.add_row("guessed chunk sizes", f"[yellow]{summary.estimated}[/]")
    table.add_row("duration", _seconds(summary.duration_s))
    table.add_row("output tokens/s", _number(summary.output_tokens_per_s))
    table.add_row("total tokens/s", _number(summary.total_tokens_per_s))
    _add_engines(table, summary.tokens_by_engine)
    table.add_section()
    _add_times(table, "TTFT", summary.ttft_s)
    _add_itl(table, summary)
    _add_times(table, "chunk gap", summary.chunk_gap_s)
    _add_times(table, f"TPOT ({summary.tpot_s.count} requests)", summary.tpot_s)
    _add_times(table, "latency / output tokens", summary.normalized_latency_s)
    _add_times(table, "latency / all tokens", summary.normalized_latency_all_s)
    _add_times(table, "latency", summary.latency_s)
    _add_times(table, "send lag of client", summary.send_lag_s)
    if summary.window:
        _add_window(table, summary.window)
    return table


def sweep_table(rows: Sequence[tuple[Circumstances, Summary]]) -> Table:
    """A line for each request rate: throughput, and the latencies that targets are set for; ms/tok
    is the latency divided by output tokens."""
    first = rows[0][0]
    table = Table(
        title=escape(f"{first.model}: {first.source or 'requests'}, by request rate"),
        caption=escape(f"{first.origin}; times from the real send"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in (
        "req/s", "answered", "out\ntok/s", "CPU\nshare", "ms/tok\nmean", "TTFT ms\np50", "\np99",
        "ITL ms\np50", "\np99", "TPOT ms\nmean",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for circumstances, summary in rows:
        rate = circumstances.request_rate
        by_engine = summary.tokens_by_engine
        share = by_engine.get("cpu", 0) / summary.output_tokens if summary.output_tokens else 0.0
        table.add_row(
            "inf" if rate is None else f"{rate:g}",
            f"{summary.succeeded}/{summary.requests}",
            "–" if summary.output_tokens_per_s is None else f"{summary.output_tokens_per_s:,.0f}",
            f"{share:.0%}" if set(by_engine) - {UNREPORTED} else "–",
            _milliseconds(summary.normalized_latency_s.mean),
            _milliseconds(summary.ttft_s.p50),
            _milliseconds(summary.ttft_s.p99),
            _milliseconds(summary.itl_s.p50),
            _milliseconds(summary.itl_s.p99),
            _milliseconds(summary.tpot_s.mean),
        )
    return table


def write_csv(path: Path, replays: Iterable[tuple[float | None, Iterable[RequestRecord]]]) -> None:
    """One line per request that was sent, of replays at a rate each: `CSV_COLUMNS`, of which index
    is the request's place in the load. What is undefined is empty."""
    # What a server says need not be Unicode.
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for rate, record in ((rate, record) for rate, records in replays for record in records):
            by_engine = tokens_by_engine([record])
            writer.writerow(
                (
                    rate, record.index, record.request.arrival_s, record.sent_s, record.end_s,
                    record.prompt_tokens, record.request.output_tokens, record.output_tokens,
                    by_engine.get("gpu", 0), by_engine.get("cpu", 0),
                    record.ttft_s, record.tpot_s, record.latency_s,
                    record.finish_reason, record.error,
                )
            )  # fmt: skip


def _add_window(table: Table, window: WindowSummary) -> None:
    table.add_section()
    table.add_row("window", f"{window.start_s:.1f} – {window.end_s:.1f} s")
    table.add_row("output tokens/s", _number(window.output_tokens_per_s))
    _add_engines(table, window.tokens_by_engine)
    sent = f"{window.requests}"
    if window.unanswered:
        sent += f", [yellow]{window.unanswered}[/] without a token"
    table.add_row("requests sent", sent)
    _add_times(table, "TTFT", window.ttft_s)
    _add_itl(table, window)


def _add_itl(table: Table, seen: Summary | WindowSummary) -> None:
    _add_times(table, "ITL", seen.itl_s)
    if len(seen.itl_by_engine_s) > 1:
        for engine, times in seen.itl_by_engine_s.items():
            _add_times(table, f"ITL, {escape(engine)}", times)


def _add_engines(table: Table, tokens_by_engine: Mapping[str, int]) -> None:
    if set(tokens_by_engine) - {UNREPORTED}:
        total = sum(tokens_by_engine.values())
        for engine, tokens in tokens_by_engine.items():
            share = tokens / total
            table.add_row(f"output tokens, {escape(engine)}", f"{tokens:,} ({share:.0%})")


def _add_times(table: Table, name: str, times: Distribution) -> None:
    columns = (times.mean, times.p50, times.p90, times.p99, times.max)
    table.add_row(name, *(_seconds(value) for value in columns))


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.1f} ms"


def _milliseconds(value: float | None) -> str:
    """Without the unit, where columns are many."""
    if value is None:
        return "–"
    return f"{value * 1e3:,.1f}" if value < 0.1 else f"{value * 1e3:,.0f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
