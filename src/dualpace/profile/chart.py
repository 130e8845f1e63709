"""Draws by which route a CPU batch gains most, over its rows and the length of their contexts.

From a profile's predictions alone; what an iteration takes is drawn as contours, the default ITL
target among them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualpace.core.plan import Route
from dualpace.policy.cost_model import TableCostModel
from dualpace.policy.host import HostRules, default_itl_target, gpu_token_rate, runnable
from dualpace.profile.table import Profile

ROUTES: tuple[Route, ...] = ("local", "assist", "assist2")
NAMES = {"local": "local", "assist": "assist", "assist2": "assist, two halves"}
COLOURS = {"none": "#dddddd", "local": "#8da0cb", "assist": "#66c2a5", "assist2": "#fc8d62"}
MAX_ROWS = 256
LONGEST = 16384


def draw_regions(profile: Profile, file: Path) -> None:
    """Write the chart; the file's ending tells the format. Raises `ConfigError` if the profile
    covers no way to run CPU iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, contexts, best, seconds = regions(profile)
    target = default_itl_target(*_costs(profile), MAX_ROWS, profile.gpu_kv_tokens)
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.pcolormesh(
        rows, contexts, best.T, cmap=ListedColormap([*COLOURS.values()]), vmin=-0.5, vmax=3.5,
        shading="nearest",
    )  # fmt: skip
    levels = sorted({0.1, 0.2, 0.5, 1.0, 2.0, 5.0, round(target, 3)})
    lines = axes.contour(rows, contexts, seconds.T, levels=levels, colors="black", linewidths=0.8)
    axes.clabel(lines, fmt=lambda value: f"{value:g} s")
    axes.set(
        xscale="log", yscale="log", xlabel="rows of the CPU batch",
        ylabel="tokens of context a row",
        title=f"{profile.model} on {profile.fingerprint.device}\nITL target {target:.2f} s",
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
    figure.savefig(file, dpi=150)


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
    costs = TableCostModel(profile.points)
    routes = runnable(costs, ROUTES)
    if not routes:
        costs.cpu_iteration(1, 1)  # says what is missing
    return costs, routes
