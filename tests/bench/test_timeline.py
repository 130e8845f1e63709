"""Tokens over time and the CPU engine's longest gap, on records whose answers are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.timeline import Gap, longest_cpu_gap, make_timeline


def record(*chunks: tuple[float, str | None]) -> RequestRecord:
    return RequestRecord(
        LoadRequest(1, len(chunks)),
        0.0,
        0.0,
        1,
        [Chunk(time, 1, engine) for time, engine in chunks],
    )


def test_bins_of_a_long_replay_are_longer_and_lose_no_token() -> None:
    line = make_timeline([record((0.5, "gpu"), (3e6, "gpu"), (1e9, "gpu"))])
    assert 50_000 < len(line.tokens_by_engine["gpu"]) <= 100_000
    assert sum(line.tokens_by_engine["gpu"]) == 3
    assert line.tokens_by_engine["gpu"][int(3e6 // line.bin_s)] == 1


def test_tokens_are_counted_in_bins_by_engine_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0.0, 37.0, 400))
    tokens = rng.integers(1, 4, 400)
    engines = rng.choice(["gpu", "cpu"], 400)
    chunks = [
        Chunk(float(t), int(n), str(e)) for t, n, e in zip(times, tokens, engines, strict=True)
    ]
    records = [RequestRecord(LoadRequest(1, 1), 0.0, 0.0, 1, chunks[part::5]) for part in range(5)]
    line = make_timeline(records, bin_s=1.0)
    for engine in ("gpu", "cpu"):
        mine = engines == engine
        counts, _ = np.histogram(times[mine], np.arange(38.0), weights=tokens[mine])
        assert line.tokens_by_engine[engine] == counts.tolist()


def test_a_replay_without_tokens_has_an_empty_line() -> None:
    line = make_timeline([record()])
    assert (line.tokens_by_engine, line.cpu_gap) == ({}, None)
    assert make_timeline([record((0.5, None))]).tokens_by_engine == {"unreported": [1]}


def test_a_gap_counts_while_a_request_is_evidently_the_engines() -> None:
    first = record((0.0, "gpu"), (1.0, "cpu"), (2.0, "cpu"), (6.0, "cpu"), (12.0, "gpu"))
    second = record((3.0, "gpu"), (3.5, "cpu"), (9.0, "gpu"))
    later = record((19.0, "gpu"), (20.0, "cpu"), (21.0, "cpu"))
    # From 6 to 20 nobody is known to be there: one request left, one had not come.
    assert longest_cpu_gap([first, second, later]) == Gap(3.5, 6.0)
    assert longest_cpu_gap([second]) is None
    assert longest_cpu_gap([record((1.0, "cpu"), (1.0, "cpu"))]) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_gap_is_the_definitions_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    records = [
        record(
            *(
                (float(time), str(rng.choice(["cpu", "gpu"], p=[0.7, 0.3])))
                for time in np.sort(rng.uniform(start, start + 10.0, 6))
            )
        )
        for start in rng.uniform(0.0, 60.0, 12)
    ]
    moments = sorted(c.time_s for r in records for c in r.chunks if c.engine == "cpu")
    held = [
        (a.time_s, b.time_s)
        for r in records
        for a, b in zip(r.chunks, r.chunks[1:], strict=False)
        if a.engine == b.engine == "cpu"
    ]
    gaps = [
        (end - start, start, end)
        for start, end in itertools.pairwise(moments)
        if any(a <= start and end <= b for a, b in held)
    ]
    assert longest_cpu_gap(records) == Gap(*max(gaps)[1:])
