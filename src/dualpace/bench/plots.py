"""The figure of a replay: tokens received over time, of all engines and of the CPU engine.

Draws what the records hold, to the token; `figures` draws from reports, to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpace.bench.drawing import (
    CPU_COLOR,
    TOTAL_COLOR,
    count_in_thousands,
    literal_text,
    make_figure,
    save_figure,
)
from dualpace.bench.record import RequestRecord
from dualpace.bench.report import Circumstances

# Colour, name, and on which side of the line's end the label stands: apart even where lines meet.
TOTAL_STYLE = (TOTAL_COLOR, "all engines", "bottom")
CPU_STYLE = (CPU_COLOR, "CPU engine", "top")


def cumulative_tokens(
    records: Sequence[RequestRecord], engine: str | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Arrival times in seconds, ascending, and the tokens received up to and including each.

    Only chunks of `engine` if one is named. Both arrays begin with a zero.
    """
    chunks = sorted(
        (chunk.time_s, chunk.tokens)
        for record in records
        for chunk in record.chunks
        if engine is None or chunk.engine == engine
    )
    times = np.array([0.0, *(time for time, _ in chunks)])
    tokens = np.array([0, *(count for _, count in chunks)], dtype=np.int64)
    return times, np.cumsum(tokens)


def plot_tokens(path: Path, records: Sequence[RequestRecord], circumstances: Circumstances) -> None:
    """Write the figure to `path` (PNG, or what its suffix says)."""
    title = f"{circumstances.model}: {circumstances.load}"
    with literal_text():
        figure, (axes,) = make_figure(title, circumstances.origin)
    end = max((record.end_s for record in records), default=0.0)
    times, tokens = cumulative_tokens(records)
    _draw(axes, times, tokens, end, TOTAL_STYLE)
    cpu_times, cpu_tokens = cumulative_tokens(records, "cpu")
    if cpu_tokens[-1]:
        _draw(axes, cpu_times, cpu_tokens, end, CPU_STYLE)
        axes.fill_between(
            [*cpu_times, end], [*cpu_tokens, cpu_tokens[-1]], step="post",
            color=CPU_COLOR, alpha=0.15, linewidth=0,
        )  # fmt: skip
    axes.set_xlim(0.0, end * 1.2 or 1.0)
    axes.set_ylim(0.0, tokens[-1] * 1.15 or 1.0)
    axes.set_xlabel("seconds since the first request")
    axes.set_ylabel("output tokens received, cumulative")
    count_in_thousands(axes.yaxis)
    save_figure(figure, path)


def _draw(
    axes: Any,
    times: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int64],
    end: float,
    style: tuple[str, str, str],
) -> None:
    """A step line up to the end of the replay, labelled there. style: color, name, label side."""
    color, name, side = style
    axes.step([*times, end], [*tokens, tokens[-1]], where="post", color=color, linewidth=1.8)
    axes.annotate(
        f"{name}\n{tokens[-1]:,}", (end, tokens[-1]), xytext=(6, 0), textcoords="offset points",
        color=color, va=side, fontsize=9,
    )  # fmt: skip
