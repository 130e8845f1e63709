"""From records to numbers: throughput, TTFT, ITL, TPOT, normalized latency, tokens by engine.

Pure functions, no NaN: what is undefined is None. Throughput and latencies are those of requests
that were answered to the end; failed and unfinished ones are counted apart, their tokens too. A
window is different: it is about moments, and every token that arrives in it counts, those of failed
requests apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpace.bench.record import UNREPORTED, RequestRecord
from dualpace.bench.timeline import Timeline, make_timeline


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds (percentiles by linear interpolation, as numpy's default); all None if empty."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """What was seen from `start_s` to before `end_s`, seconds after the start of the replay.

    `itl_s`: of the tokens that arrived in the window; `itl_by_engine_s`: of those that came from an
    engine as the token before did; `ttft_s`: of the requests that were sent in
    it, without the `unanswered` ones, which had no token by the end of the replay.
    """

    start_s: float
    end_s: float
    output_tokens: int
    output_tokens_per_s: float | None
    tokens_by_engine: dict[str, int]
    itl_s: Distribution
    itl_by_engine_s: dict[str, Distribution]
    requests: int  # sent in the window
    unanswered: int
    ttft_s: Distribution


@dataclass(frozen=True, slots=True)
class Lengths:
    """The 0th to 100th percentile of the tokens asked for, of all requests; empty without any."""

    prompt_tokens: list[int]
    output_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything one replay tells. Rates are per second over `duration_s`, times are seconds."""

    requests: int
    succeeded: int
    failed: int
    failures: dict[str, int]  # error message -> requests
    failed_tokens: int  # received by requests that then failed
    unfinished: int  # neither: the replay was ended before they were
    unfinished_tokens: int
    wrong_length: int  # succeeded, but with another number of tokens than asked for
    estimated: int  # succeeded, but the tokens of single chunks are a guess
    duration_s: float | None  # first send to last end, failed requests included
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    tokens_by_engine: dict[str, int]
    ttft_s: Distribution
    itl_s: Distribution
    itl_by_engine_s: dict[str, Distribution]  # of tokens from an engine as the token before
    chunk_gap_s: Distribution
    tpot_s: Distribution
    normalized_latency_s: Distribution  # latency divided by output tokens (Orca's and vLLM's)
    normalized_latency_all_s: Distribution  # divided by prompt and output tokens
    latency_s: Distribution
    send_lag_s: Distribution  # real send minus intended send, all requests
    lengths: Lengths
    timeline: Timeline
    window: WindowSummary | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, ready for JSON."""
        return asdict(self)


def summarize(
    records: Sequence[RequestRecord], window: tuple[float, float] | None = None
) -> Summary:
    """The summary of one replay. window: seconds from and to which to look closer."""
    good = [record for record in records if record.ok]
    failed = [record for record in records if record.error is not None]
    cut = [record for record in records if record.cut]
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    duration = _duration(records)
    by_engine = tokens_by_engine(good)
    return Summary(
        requests=len(records),
        succeeded=len(good),
        failed=len(failed),
        failures=dict(Counter(str(record.error) for record in failed).most_common()),
        failed_tokens=sum(record.output_tokens for record in failed),
        unfinished=len(cut),
        unfinished_tokens=sum(record.output_tokens for record in cut),
        wrong_length=sum(record.output_tokens != record.request.output_tokens for record in good),
        estimated=sum(record.estimated for record in good),
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=_rate(len(good), duration),
        output_tokens_per_s=_rate(output_tokens, duration),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration),
        tokens_by_engine=by_engine,
        ttft_s=distribution(record.ttft_s for record in good),
        itl_s=_itl(good),
        itl_by_engine_s=_itl_by_engine(good, by_engine),
        chunk_gap_s=distribution(_gaps(good)[0]),
        tpot_s=distribution(record.tpot_s for record in good),
        normalized_latency_s=distribution(_per_token(record, 0) for record in good),
        normalized_latency_all_s=distribution(
            _per_token(record, record.prompt_tokens) for record in good
        ),
        latency_s=distribution(record.latency_s for record in good),
        send_lag_s=distribution(record.sent_s - record.request.arrival_s for record in records),
        lengths=_lengths(records),
        timeline=make_timeline(records),
        window=None if window is None else summarize_window(records, *window),
    )


def summarize_window(
    records: Sequence[RequestRecord], start_s: float, end_s: float
) -> WindowSummary:
    """What arrived from `start_s` to before `end_s`, at whatever time its request was sent."""
    seen = [record for record in records if record.error is None]
    sent = [record for record in seen if start_s <= record.sent_s < end_s]
    by_engine = tokens_by_engine(seen, start_s, end_s)
    tokens = sum(by_engine.values())
    return WindowSummary(
        start_s=start_s,
        end_s=end_s,
        output_tokens=tokens,
        output_tokens_per_s=_rate(tokens, end_s - start_s),
        tokens_by_engine=by_engine,
        itl_s=_itl(seen, start_s, end_s),
        itl_by_engine_s=_itl_by_engine(seen, by_engine, start_s, end_s),
        requests=len(sent),
        unanswered=sum(not record.chunks for record in sent),
        ttft_s=distribution(record.ttft_s for record in sent),
    )


def distribution(values: Iterable[float | None] | npt.NDArray[np.float64]) -> Distribution:
    """Mean and percentiles of `values`, those that are None left out."""
    numbers = np.array([value for value in values if value is not None], dtype=np.float64)
    if not numbers.size:
        return Distribution(count=0)
    p50, p90, p99 = np.percentile(numbers, (50, 90, 99)).tolist()
    return Distribution(numbers.size, float(numbers.mean()), p50, p90, p99, float(numbers.max()))


def tokens_by_engine(
    records: Iterable[RequestRecord], start_s: float = -math.inf, end_s: float = math.inf
) -> dict[str, int]:
    """Output tokens that arrived in that time, by the engine named in their chunk.

    Those of a chunk that names none are under `UNREPORTED`.
    """
    tokens: Counter[str] = Counter()
    for record in records:
        for chunk in record.chunks:
            if start_s <= chunk.time_s < end_s:
                tokens[chunk.engine or UNREPORTED] += chunk.tokens
    return dict(sorted(tokens.items()))


def _itl_by_engine(
    records: Sequence[RequestRecord],
    engines: Iterable[str],
    start_s: float = -math.inf,
    end_s: float = math.inf,
) -> dict[str, Distribution]:
    return {
        engine: _itl(records, start_s, end_s, engine) for engine in engines if engine != UNREPORTED
    }


def _itl(
    records: Iterable[RequestRecord],
    start_s: float = -math.inf,
    end_s: float = math.inf,
    engine: str | None = None,
) -> Distribution:
    """Inter-token latencies; arguments are those of `_gaps`.

    A gap that ends in k tokens counts as k latencies of a k-th of it: a server that bundles tokens
    gains nothing in ITL, and the gap that its user sees is reported beside it.
    """
    gaps, tokens = _gaps(records, start_s, end_s, engine)
    return distribution(np.repeat(gaps / tokens, tokens))


def _gaps(
    records: Iterable[RequestRecord],
    start_s: float = -math.inf,
    end_s: float = math.inf,
    engine: str | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Seconds between a chunk that arrived in that time and the one before it, and its tokens; of
    all chunks, or where both came from `engine`."""
    gaps: list[float] = []
    tokens: list[int] = []
    for record in records:
        for before, chunk in zip(record.chunks, record.chunks[1:], strict=False):
            theirs = engine is None or before.engine == chunk.engine == engine
            if theirs and start_s <= chunk.time_s < end_s:
                gaps.append(chunk.time_s - before.time_s)
                tokens.append(chunk.tokens)
    return np.array(gaps, dtype=np.float64), np.array(tokens, dtype=np.int64)


def _per_token(record: RequestRecord, prompt_tokens: int) -> float | None:
    """End-to-end latency divided by output tokens and so many of the prompt."""
    latency = record.latency_s
    return None if latency is None else latency / (record.output_tokens + prompt_tokens)


def _lengths(records: Sequence[RequestRecord]) -> Lengths:
    asked = [(record.request.prompt_tokens, record.request.output_tokens) for record in records]
    if not asked:
        return Lengths([], [])
    prompts, outputs = np.percentile(asked, range(101), axis=0, method="nearest").T.tolist()
    return Lengths(prompts, outputs)


def _duration(records: Sequence[RequestRecord]) -> float | None:
    if not records:
        return None
    return max(record.end_s for record in records) - min(record.sent_s for record in records)


def _rate(count: int, duration_s: float | None) -> float | None:
    return count / duration_s if duration_s else None
