"""A duration as a function of two sizes, from measured points: monotone, piecewise linear, pure.

Knows neither what was measured nor what it is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
FAR_ENOUGH = 0.75  # of the last coordinate: what is nearer to it tells no slope, but noise
REMEMBERED_PLACES = 1024  # of a surface: far more than one step asks for


class Estimate(NamedTuple):
    """A duration; `extrapolated` if no measured points surround it."""

    seconds: float
    extrapolated: bool


class Surface:
    """z(x, y) through scattered points whose coordinates repeat; never decreasing in x or y.

    points: (x, y, z), z ≥ 0, with at least two different x and two different y. Between points it
    is bilinear, and exact on them wherever they are monotone themselves; noise that is not is
    evened out. Below the smallest coordinate the value is held, beyond the largest it is linear.
    """

    def __init__(self, points: Sequence[tuple[float, float, float]]) -> None:
        self._x = sorted({x for x, _, _ in points})
        self._y = sorted({y for _, y, _ in points})
        z = np.full((len(self._x), len(self._y)), np.nan)
        for x, y, value in points:
            z[self._x.index(x), self._y.index(y)] = value
        axes = np.array(self._x, np.float64), np.array(self._y, np.float64)
        z, known = _complete(_even_out(z), *axes)
        # The running maximum keeps the slopes beyond an edge from crossing along the other axis.
        i, j = _far_from_last(self._x), _far_from_last(self._y)
        beyond_x = np.maximum.accumulate((z[-1] - z[i]) / (self._x[-1] - self._x[i]))
        beyond_y = np.maximum.accumulate((z[:, -1] - z[:, j]) / (self._y[-1] - self._y[j]))
        # Plain lists: a simulation asks hundreds of thousands of times for one scalar.
        self._z: list[list[float]] = z.tolist()
        self._known: list[list[bool]] = known.tolist()
        self._beyond_x: list[float] = beyond_x.tolist()
        self._beyond_y: list[float] = beyond_y.tolist()
        # The value at (x, y). A step is judged by much the same places as the one before it.
        self.at = lru_cache(REMEMBERED_PLACES)(self._at)

    def _at(self, x: float, y: float) -> Estimate:
        i, u = _locate(self._x, x)
        j, v = _locate(self._y, y)
        near, far = self._z[i], self._z[i + 1]
        a, b, c, d = (1 - u) * (1 - v), (1 - u) * v, u * (1 - v), u * v
        seconds = a * near[j] + b * near[j + 1] + c * far[j] + d * far[j + 1]
        near_known, far_known = self._known[i], self._known[i + 1]
        inside = (
            self._x[0] <= x <= self._x[-1]
            and self._y[0] <= y <= self._y[-1]
            and (near_known[j] or not a)
            and (near_known[j + 1] or not b)
            and (far_known[j] or not c)
            and (far_known[j + 1] or not d)
        )
        if x > self._x[-1]:
            slope = (1 - v) * self._beyond_x[j] + v * self._beyond_x[j + 1]
            seconds += slope * (x - self._x[-1])
        if y > self._y[-1]:
            slope = (1 - u) * self._beyond_y[i] + u * self._beyond_y[i + 1]
            seconds += slope * (y - self._y[-1])
        return Estimate(seconds, not inside)


def _locate(nodes: list[float], value: float) -> tuple[int, float]:
    """The cell of `value` and its place in it from 0 to 1; the outermost place beyond the ends."""
    cell = bisect_right(nodes, value, 1, len(nodes) - 1) - 1
    low, high = nodes[cell], nodes[cell + 1]
    if value <= low:
        return cell, 0.0
    if value >= high:
        return cell, 1.0
    return cell, (value - low) / (high - low)


def _far_from_last(nodes: Sequence[float] | Floats) -> int:
    """The index of that one, of two or more ascending coordinates, from which to the last one the
    slope is taken: the nearest that is far enough, or the first if none is."""
    return max(0, int(np.searchsorted(nodes[:-1], FAR_ENOUGH * nodes[-1], side="right")) - 1)


def _even_out(z: Floats) -> Floats:
    """Measured cells (the others are NaN) made monotone; those that are so already stay as is.

    Halfway between the largest monotone table below the data and the smallest one above it.
    """
    return (_at_least(z) + _at_most(z)) / 2 + np.where(np.isnan(z), np.nan, 0.0)


def _at_least(z: Floats) -> Floats:
    """For each cell the largest measured value at no larger coordinates; 0 if there is none."""
    filled = np.where(np.isnan(z), 0.0, z)
    return _running_max(filled)


def _at_most(z: Floats) -> Floats:
    """For each cell the smallest measured value at no smaller coordinates; inf if none."""
    filled = np.where(np.isnan(z), np.inf, z)
    return -_running_max(-filled[::-1, ::-1])[::-1, ::-1]


def _running_max(z: Floats) -> Floats:
    largest: Floats = np.maximum.accumulate(np.maximum.accumulate(z, axis=0), axis=1)
    return largest


def _complete(z: Floats, x: Floats, y: Floats) -> tuple[Floats, npt.NDArray[Any]]:
    """Fill the NaN of a monotone table along its rows, and say which cells measurements surround.

    A batch of few rows cannot have a long context, nor a batch of many rows a short one, so no
    measured table is full. A row whose cells are too close to tell a slope grows along y as its
    neighbours do.
    """
    raw = np.empty_like(z)
    known = np.zeros(z.shape, bool)
    lone = []
    for row, values in enumerate(z):
        at = np.flatnonzero(~np.isnan(values))
        first, last = at[0], at[-1]
        raw[row] = np.interp(y, y[at], values[at])
        far = at[_far_from_last(y[at])] if len(at) > 1 else last
        if y[far] <= FAR_ENOUGH * y[last] and far < last:
            slope = (values[last] - values[far]) / (y[last] - y[far])
            raw[row] += slope * np.maximum(0.0, y - y[last])
        else:
            lone.append((row, last))
        known[row, first : last + 1] = True
    others = np.delete(np.arange(len(x)), [row for row, _ in lone])
    for row, at in lone if len(others) else ():
        for column in range(at + 1, len(y)):
            growth = raw[others, column] - raw[others, at]
            raw[row, column] += np.interp(x[row], x[others], growth)
    # Within what is measured around it; the running maximum leaves measured cells alone.
    return _running_max(np.clip(raw, _at_least(z), _at_most(z))), known
