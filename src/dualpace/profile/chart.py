"""Draws a profile: by which route a CPU batch gains most, and what either engine takes for what.

From predictions alone. In the map of routes, what an iteration takes is drawn as contours, the
default ITL target among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dualpace.core.plan import ROUTES, Route
from dualpace.policy.cost_model import TableCostModel
from dualpace.policy.host import HostRules, default_itl_target, gpu_token_rate, runnable
from dualpace.policy.surface import Estimate
from dualpace.profile.table import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"local": "local", "assist": "assist", "assist2": "assist, two halves"}
COLOURS = {"none": "#dddddd", "local": "#8da0cb", "assist": "#66c2a5", "assist2": "#fc8d62"}
MAX_ROWS = 256
LONGEST = 16384
ATTENDING_ROWS = 32  # whose attention is compared


def draw(profile: Profile, file: Path) -> None:
    """Write the chart; the file's ending tells the format. Raises `ConfigError` if the profile
    covers no way to run CPU iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    regions_axes, dense_axes, attention_axes = figure.subplots(1, 3)
    _draw_regions(profile, regions_axes)
    rows, dense = dense_latencies(profile)
    context, attention = attention_latencies(profile)
    for axes, x, lines, label in (
        (dense_axes, rows, dense, "rows"),
        (attention_axes, context, attention, f"tokens of context of {ATTENDING_ROWS} rows"),
    ):
        for name, seconds in lines.items():
            axes.plot(x, 1e3 * seconds, label=name)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms")
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    dense_axes.set_title("all layers but attention")
    attention_axes.set_title("attention of all layers")
    figure.suptitle(f"{profile.model} on {profile.fingerprint.hardware}, {profile.date}")
    figure.savefig(file, dpi=150)


def dense_latencies(profile: Profile) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows, and seconds of an iteration's dense layers by who computes them."""
    costs = profile.cost_model()
    rows = np.unique(np.geomspace(1, MAX_ROWS, 40).round().astype(int))
    lines = {}
    if costs.covers("gpu_decode"):
        lines["GPU"] = [costs.gpu_decode(int(n), 0).seconds for n in rows]
    if costs.covers("cpu_iteration"):
        lines["CPU"] = [costs.cpu_iteration(int(n), 0).seconds for n in rows]
    if costs.covers("assist"):
        lines["GPU for the CPU engine"] = [costs.assist(int(n), 0.0).seconds for n in rows]
    return rows, {name: np.array(seconds) for name, seconds in lines.items()}


def attention_latencies(profile: Profile) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tokens of context of `ATTENDING_ROWS` rows, and seconds of their attention by engine: what an
    iteration takes longer for its context."""
    costs = profile.cost_model()
    contexts = np.geomspace(1024, ATTENDING_ROWS * LONGEST, 40).round().astype(int)

    def beyond(step: Callable[[int, int], Estimate]) -> np.ndarray:
        rest = step(ATTENDING_ROWS, 0).seconds
        return np.array([step(ATTENDING_ROWS, int(n)).seconds - rest for n in contexts])

    lines = {}
    if costs.covers("gpu_decode"):
        lines["GPU"] = beyond(costs.gpu_decode)
    if costs.covers("cpu_attention"):
        lines["CPU"] = beyond(costs.cpu_attention)
    elif costs.covers("cpu_iteration"):
        lines["CPU"] = beyond(costs.cpu_iteration)
    return contexts, lines


def _draw_regions(profile: Profile, axes: Axes) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows, contexts, best, seconds = regions(profile)
    target = default_itl_target(*_costs(profile), MAX_ROWS, profile.gpu_kv_tokens)
    axes.pcolormesh(
        rows, contexts, best.T, cmap=ListedColormap([*COLOURS.values()]), vmin=-0.5, vmax=3.5,
        shading="nearest",
    )  # fmt: skip
    levels = sorted({0.1, 0.2, 0.5, 1.0, 2.0, 5.0, round(target, 3)})
    lines = axes.contour(rows, contexts, seconds.T, levels=levels, colors="black", linewidths=0.8)
    axes.clabel(lines, fmt=lambda value: f"{value:g} s")
    axes.set(
        xscale="log", yscale="log", xlabel="rows of the CPU batch",
        ylabel="tokens of context a row", title=f"route; ITL target {target:.2f} s",
    )  # fmt: skip
    present = {int(value) for value in np.unique(best)}
    labels = {"none": "gains nothing", **NAMES}
    axes.legend(
        handles=[
            Patch(color=colour, label=labels[name])
            for index, (name, colour) in enumerate(COLOURS.items())
            if index in present
        ],
        loc="lower left",
    )


def regions(
    profile: Profile,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, contexts of a row, and over both: 0 where nothing is gained, else 1 + the index in
    `ROUTES` of the best route; and the seconds of an iteration by it.

    The GPU is taken to decode with all its seats full, beside no prompts.
    """
    costs, routes = _costs(profile)
    rules = HostRules(costs, 1.0, routes)
    rate = gpu_token_rate(costs, profile.gpu_kv_tokens, MAX_ROWS)
    rows = np.unique(np.geomspace(1, MAX_ROWS, 60).round().astype(int))
    contexts = np.unique(np.geomspace(64, LONGEST, 60).round().astype(int))
    best = np.zeros((len(rows), len(contexts)), int)
    seconds = np.zeros(best.shape)
    for i, count in enumerate(rows):
        for j, context in enumerate(contexts):
            gains = {
                route: rules.gain(route, int(count), int(count * context), rate, 0.0)
                for route in routes
            }
            route = max(gains, key=lambda name: gains[name][0])
            seconds[i, j] = gains[route][1]
            best[i, j] = 1 + ROUTES.index(route) if gains[route][0] > 0.0 else 0
    return rows, contexts, best, seconds


def _costs(profile: Profile) -> tuple[TableCostModel, tuple[Route, ...]]:
    costs = profile.cost_model()
    routes = runnable(costs, ROUTES)
    if not routes:
        costs.cpu_iteration(1, 1)  # says what is missing
    return costs, routes
