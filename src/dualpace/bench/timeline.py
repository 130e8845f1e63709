"""When tokens arrived: counts for each second by engine, and how long the CPU engine stood still.

Pure functions of records, small enough for a report in JSON. All times are seconds after the start
of the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualpace.bench.record import UNREPORTED, RequestRecord

BIN_S = 1.0
MAX_BINS = 100_000  # a day in seconds; for what takes longer, bins are doubled


@dataclass(frozen=True, slots=True)
class Gap:
    """From one token's arrival to the next one's."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Tokens that arrived in bins of `bin_s`, the first of which begins at 0; at most `MAX_BINS`.

    Every token counts, also those of requests that failed or were cut off. All lists are equally
    long. `cpu_gap` is `longest_cpu_gap`'s.
    """

    bin_s: float
    tokens_by_engine: dict[str, list[int]]
    cpu_gap: Gap | None


def make_timeline(records: Sequence[RequestRecord], bin_s: float = BIN_S) -> Timeline:
    """The time line of one replay, in bins of `bin_s` or, where it is long, longer ones."""
    end = max((chunk.time_s for record in records for chunk in record.chunks), default=0.0)
    while end // bin_s >= MAX_BINS:
        bin_s *= 2
    chunks = [
        (int(chunk.time_s // bin_s), chunk.engine or UNREPORTED, chunk.tokens)
        for record in records
        for chunk in record.chunks
    ]
    length = 1 + max((index for index, _, _ in chunks), default=-1)
    tokens = {engine: [0] * length for engine in sorted({engine for _, engine, _ in chunks})}
    for index, engine, count in chunks:
        tokens[engine][index] += count
    return Timeline(bin_s, tokens, longest_cpu_gap(records))


def longest_cpu_gap(records: Sequence[RequestRecord], engine: str = "cpu") -> Gap | None:
    """The longest time without a token from `engine` in which it evidently had work.

    A client sees no queues. It knows that a request was the engine's between two successive tokens
    that both are, and of no other moment: before the first of them the request may have been on its
    way, after the last one too. So this is a lower bound. None if there is no such pair.
    """
    pairs = [
        (before.time_s, after.time_s)
        for record in records
        for before, after in zip(record.chunks, record.chunks[1:], strict=False)
        if before.engine == after.engine == engine
    ]
    if not pairs:
        return None
    times: npt.NDArray[np.float64] = np.unique(
        [chunk.time_s for record in records for chunk in record.chunks if chunk.engine == engine]
    )
    first, last = np.searchsorted(times, np.array(pairs)).T
    # How many pairs span the gap that follows each token: +1 where one begins, −1 where it ends.
    steps = np.zeros(len(times), dtype=np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last, -1)
    gaps = np.where(np.cumsum(steps)[:-1] > 0, np.diff(times), 0.0)
    if not gaps.any():  # all pairs arrived at one moment
        return None
    longest = int(gaps.argmax())
    return Gap(float(times[longest]), float(times[longest + 1]))
