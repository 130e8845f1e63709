"""The looks that all figures share: colours, axes, and what was measured where, written below.

matplotlib is imported when a figure is made, so that the command line starts without it. Figures
are made without pyplot: they need no display and leave no global state; a PNG is drawn by Agg.
"""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

TOTAL_COLOR = "#22313f"
CPU_COLOR = "#e4572e"
MUTED_COLOR = "#6b7680"
GRID_COLOR = "#e3e7ea"
LINE_COLORS = ("#e4572e", "#22313f", "#2e86ab", "#5b8c5a", "#8e5572", "#d4a017", "#6b7680")
PANEL_SIZE = (8.0, 4.8)  # inches
SMALL_PANEL_SIZE = (4.6, 3.9)
CHARACTERS_PER_INCH = 15
MOST_INSIDE = 12  # lines of a legend; of more there is no room left to see what they stand for


def make_figure(title: str, origin: str, panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure with panels side by side. origin: what is written below it, wrapped to its width."""
    from matplotlib.figure import Figure

    width, height = PANEL_SIZE if panels == 1 else SMALL_PANEL_SIZE
    figure = Figure(figsize=(width * panels, height), dpi=150, layout="constrained")
    room = int(width * panels * CHARACTERS_PER_INCH)
    figure.suptitle(
        textwrap.fill(title, int(room * 0.7)), x=0.01, ha="left", fontsize=11, color=TOTAL_COLOR
    )
    below = "\n".join(textwrap.fill(line, room) for line in origin.splitlines())
    figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=MUTED_COLOR)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color=GRID_COLOR, linewidth=0.8)
        each.set_axisbelow(True)
    return figure, axes


def literal_text() -> AbstractContextManager[None]:
    """Within it a $ is one, also in pairs: no formula begins."""
    from matplotlib import rc_context

    return rc_context({"text.parse_math": False})


def count_in_thousands(axis: Any) -> None:
    """Ticks such as 12,000."""
    from matplotlib.ticker import StrMethodFormatter

    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def use_log_scale(axis: Any) -> None:
    """Ticks such as 0.2, 0.5 and 1, also where an axis spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def add_legend(axes: Any) -> None:
    """Inside the axes, where it hides least of the lines; beside them, small and in two columns,
    where it would hide all."""
    if len(axes.get_legend_handles_labels()[1]) <= MOST_INSIDE:
        # Asked for by name: where that place is only the default, a search for it that takes a
        # second, on a machine that is busy, is warned of.
        legend = axes.legend(frameon=False, loc="best")
        legend.set_in_layout(False)  # or long names would leave the axes no room at all
    else:
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "ncols": 2}
        axes.legend(frameon=False, fontsize=6, columnspacing=1.0, **beside)


def start_at_zero(axes: Any) -> None:
    """The y axis from 0, with some room above what is drawn."""
    axes.set_ylim(0.0, axes.get_ylim()[1] * 1.05)


def save_figure(figure: Any, path: Path) -> None:
    """Write it; the suffix says in which format. An SVG's text stays text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)
