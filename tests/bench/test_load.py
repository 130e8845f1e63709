"""The load: published lengths, both trace formats, arrivals, prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dualpace.bench.load import (
    AZURE_CONV_2023,
    LoadRequest,
    LogNormal,
    arrive_as_traced,
    arrive_poisson,
    clip_lengths,
    draw_prompts,
    read_azure_csv,
    scale_lengths,
)
from dualpace.core.errors import ConfigError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("lengths", "mean", "median"),
    [(AZURE_CONV_2023.prompt, 1155, 1020), (AZURE_CONV_2023.output, 211, 129)],
    ids=["prompt", "output"],
)
def test_unclipped_draws_have_the_published_mean_and_median(
    lengths: LogNormal, mean: float, median: float
) -> None:
    draws = lengths.sample(np.random.default_rng(1), 200_000)
    assert draws.mean() == pytest.approx(mean, rel=0.02)
    assert np.median(draws) == pytest.approx(median, rel=0.02)


def test_generated_load_is_seeded_clipped_and_never_empty() -> None:
    model = AZURE_CONV_2023.scaled(0.01)
    load = model.generate(2000, seed=7)
    assert load == model.generate(2000, seed=7)
    assert load != model.generate(2000, seed=8)
    prompts = [request.prompt_tokens for request in load]
    outputs = [request.output_tokens for request in load]
    assert min(prompts) >= 1
    assert min(outputs) == 1
    assert max(outputs) == 10  # a hundredth of the longest published output
    assert np.mean(prompts) == pytest.approx(11.55, rel=0.05)


@pytest.mark.parametrize(
    "rows",
    [
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        "2024-05-10 00:00:46.680590+00:00,374,44\n2024-05-10 00:00:50.995169+00:00,396,109",
        "2024-05-10 02:00:50.995169+02:00,396,109\r\n2024-05-10 00:00:46.680590+00:00,374,44\r\n",
    ],
    ids=["2023", "2024-with-zone", "unsorted-mixed-zones-crlf"],
)
def test_both_trace_formats_give_the_same_requests(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + rows, encoding="utf-8-sig", newline="")
    first, second = read_azure_csv(path)
    assert first == LoadRequest(374, 44, 0.0)
    assert second == LoadRequest(396, 109, pytest.approx(4.314579))


def test_rows_that_are_too_long_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [(9, 2), (8, 2), (1, 10), (5, 5), (1, 1)]
    path.write_text(HEADER + "".join(f"2024-05-12 00:00:00+00:00,{p},{o}\n" for p, o in rows))
    load = read_azure_csv(path, limit=2, longest=10)
    assert [(row.prompt_tokens, row.output_tokens) for row in load] == [(8, 2), (5, 5)]


def test_trace_stops_at_the_limit_and_takes_whole_seconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2024-05-12 00:00:00+00:00,0,0\n" * 3 + "junk\n")
    assert read_azure_csv(path, limit=3) == [LoadRequest(1, 1, 0.0)] * 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "lacks TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEADER, "no requests"),
        (HEADER + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47,x,44\n", "line 3"),
        (HEADER + "2023-11-16 18:15:46.68,374\n", "line 2"),
        (HEADER + "2023-11-16 18:15:46.68,-5,44\n", "line 2: -5 is not"),
        (HEADER + f"2023-11-16 18:15:46.68,{10**20},44\n", "line 2: 10"),
        (HEADER + "1" * 200_000 + ",374,44\n", "cannot read"),
    ],
    ids=["columns", "empty", "number", "short-row", "negative", "huge", "long-field"],
)
def test_a_wrong_trace_is_refused_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_azure_csv(path)


def test_a_missing_trace_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_azure_csv(tmp_path / "none.csv")


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    load = arrive_poisson([LoadRequest(1, 1)] * 20_000, rate=4.0, seed=3)
    arrivals = np.array([request.arrival_s for request in load])
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


def test_trace_arrivals_keep_their_shape_at_another_rate() -> None:
    load = [LoadRequest(1, 1, second) for second in (0.0, 1.0, 1.5, 6.0)]
    arrivals = [request.arrival_s for request in arrive_as_traced(load, rate=5.0)]
    assert arrivals == pytest.approx([0.0, 0.1, 0.15, 0.6])
    assert arrive_as_traced(load, rate=float("inf")) == load


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_poisson_needs_a_positive_finite_rate(rate: float) -> None:
    with pytest.raises(ConfigError, match="--request-rate"):
        arrive_poisson([LoadRequest(1, 1)], rate, seed=0)


def test_clipping_keeps_up_to_half_the_room_for_the_output() -> None:
    load = [LoadRequest(*pair) for pair in [(50, 50), (99, 10), (10, 300), (300, 300), (300, 5)]]
    clipped, count = clip_lengths(load, 100)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in clipped]
    assert lengths == [(50, 50), (90, 10), (10, 90), (50, 50), (95, 5)]
    assert count == 4


def test_scaling_leaves_at_least_one_token() -> None:
    assert scale_lengths([LoadRequest(300, 3, 2.0)], 0.1) == [LoadRequest(30, 1, 2.0)]


def test_prompts_have_exactly_the_length_and_ordinary_ids() -> None:
    load = AZURE_CONV_2023.scaled(0.1).generate(50, seed=0)
    prompts = draw_prompts(load, vocab_size=1000, seed=0)
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in load]
    ids = np.concatenate(prompts)
    assert ids.min() >= 100
    assert ids.max() < 1000
    assert prompts == draw_prompts(load, vocab_size=1000, seed=0)
