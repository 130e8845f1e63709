"""Metrics of hand-made records whose answers are known exactly."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

from dualpace.bench.load import LoadRequest
from dualpace.bench.metrics import Distribution, distribution, summarize
from dualpace.bench.record import Chunk, RequestRecord


def make_record(
    *chunks: Chunk,
    sent: float = 0.0,
    arrival: float = 0.0,
    wanted: int | None = None,
    error: str | None = None,
) -> RequestRecord:
    tokens = sum(chunk.tokens for chunk in chunks)
    return RequestRecord(
        request=LoadRequest(10, tokens if wanted is None else wanted, arrival),
        sent_s=sent,
        end_s=chunks[-1].time_s if chunks else sent,
        prompt_tokens=10,
        chunks=list(chunks),
        error=error,
    )


STEADY = make_record(Chunk(1.0, 1, "gpu"), Chunk(1.5, 1, "cpu"), Chunk(2.5, 1, "cpu"))
BUNDLED = make_record(Chunk(3.0, 1, "gpu"), Chunk(3.5, 3, "gpu"), sent=1.5, arrival=1.25, wanted=5)
BROKEN = make_record(Chunk(3.0, 2, "gpu"), Chunk(5.0, 2, "gpu"), sent=2.0, error="gone")


def test_rates_run_from_the_first_send_to_the_last_end_and_count_successes() -> None:
    summary = summarize([STEADY, BUNDLED, BROKEN])
    assert summary.duration_s == 5.0
    assert (summary.requests, summary.succeeded, summary.failed) == (3, 2, 1)
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 7)
    assert summary.output_tokens_per_s == 7 / 5
    assert summary.total_tokens_per_s == 27 / 5
    assert summary.requests_per_s == 2 / 5


def test_failures_are_kept_apart() -> None:
    summary = summarize([STEADY, BROKEN, BROKEN])
    assert summary.failures == {"gone": 2}
    assert summary.failed_tokens == 8
    assert summary.latency_s == summarize([STEADY]).latency_s
    assert summary.tokens_by_engine == {"cpu": 2, "gpu": 1}


def test_ttft_and_latency_start_at_the_real_send() -> None:
    summary = summarize([STEADY, BUNDLED])
    assert summary.ttft_s == distribution([1.0, 1.5])
    assert summary.latency_s == distribution([2.5, 2.0])
    assert summary.send_lag_s == distribution([0.0, 0.25])
    assert summary.normalized_latency_s == distribution([2.5 / 3, 2.0 / 4])
    assert summary.normalized_latency_all_s == distribution([2.5 / 13, 2.0 / 14])


def test_several_tokens_in_a_chunk_weigh_in_itl_and_not_in_the_gap() -> None:
    summary = summarize([STEADY, BUNDLED])
    assert summary.itl_s == distribution([0.5, 1.0, 0.5 / 3, 0.5 / 3, 0.5 / 3])
    assert summary.chunk_gap_s == distribution([0.5, 1.0, 0.5])


def test_an_engines_itl_is_of_tokens_that_follow_its_own() -> None:
    summary = summarize([STEADY, BUNDLED, make_record(Chunk(1.0, 1), Chunk(1.5, 1))], (2.0, 9.0))
    assert summary.itl_by_engine_s == {
        "cpu": distribution([1.0]),
        "gpu": distribution([0.5 / 3] * 3),
    }
    assert summary.window is not None
    assert summary.window.itl_by_engine_s == summary.itl_by_engine_s


def test_tpot_needs_a_token_after_the_first_chunk() -> None:
    single = make_record(Chunk(1.0, 1))
    all_at_once = make_record(Chunk(1.0, 8))
    summary = summarize([STEADY, BUNDLED, single, all_at_once])
    assert summary.tpot_s == distribution([1.5 / 2, 0.5 / 3])


def test_a_length_other_than_asked_for_is_told() -> None:
    assert summarize([STEADY, BUNDLED]).wrong_length == 1


def test_a_window_counts_the_tokens_that_arrive_in_it_whoever_they_are_for() -> None:
    unfinished = make_record(Chunk(1.25, 1, "gpu"), Chunk(2.25, 2, "gpu"), sent=1.0)
    silent = make_record(sent=2.0)
    unfinished.cut = silent.cut = True
    late = make_record(Chunk(3.0, 1, "cpu"), sent=2.5)
    window = summarize([STEADY, unfinished, silent, late, BROKEN], (1.0, 2.5)).window
    assert window is not None
    # 1.0 and 1.5 are STEADY's, 1.25 and 2.25 the unfinished one's; at 2.5 the window is over.
    assert window.tokens_by_engine == {"cpu": 1, "gpu": 4}
    assert window.output_tokens_per_s == 5 / 1.5
    assert window.itl_s == distribution([0.5, 0.5, 0.5])
    assert (window.requests, window.unanswered) == (2, 1)
    assert window.ttft_s == distribution([0.25])


def test_tokens_without_an_engine_are_unreported() -> None:
    summary = summarize([make_record(Chunk(1.0, 2), Chunk(2.0, 1, "cpu"))])
    assert summary.tokens_by_engine == {"cpu": 1, "unreported": 2}


def test_lengths_are_those_asked_for_in_percentiles() -> None:
    lengths = summarize([STEADY, BUNDLED, BROKEN]).lengths  # 3, 5 and 4 tokens were wanted
    assert len(lengths.output_tokens) == len(lengths.prompt_tokens) == 101
    assert lengths.output_tokens[::50] == [3, 4, 5]
    assert set(lengths.prompt_tokens) == {10}


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=137)
    result = distribution(values)
    assert (result.p50, result.p90, result.p99) == tuple(np.percentile(values, (50, 90, 99)))
    assert (result.count, result.mean, result.max) == (137, values.mean(), values.max())


@pytest.mark.parametrize(
    "records",
    [[], [make_record(error="refused")], [make_record(Chunk(0.0, 1))]],
    ids=["nothing", "only-failures", "no-time-passed"],
)
def test_what_is_undefined_is_none_and_never_nan(records: list[RequestRecord]) -> None:
    summary = summarize(records)
    json.dumps(summary.to_dict(), allow_nan=False)
    json.dumps(summarize(records, (1.0, 1.0)).to_dict(), allow_nan=False)
    assert summary.output_tokens_per_s is None
    assert summary.tpot_s == Distribution(0)
    empty = Distribution(0)
    assert all(getattr(empty, field.name) is None for field in fields(empty)[1:])
