"""What the benchmark asks of a server: prompt lengths, output lengths, arrival times.

Lengths come from a published Azure trace or from log-normals fitted to its statistics; arrivals
are all at once, Poisson, or the trace's own. Knows neither HTTP nor text: a prompt is random
token ids of exactly the wanted length.

Source: AzurePublicDataset (https://github.com/Azure/AzurePublicDataset), CC-BY 4.0. The 2023
traces: Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting",
ISCA 2024. The 2024 week: Stojkovic et al., "DynamoLLM", HPCA 2025.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualpace.core.errors import ConfigError

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Low ids are control and byte tokens in most vocabularies: prompts are drawn above them.
FIRST_ORDINARY_ID = 100
MAX_TRACED_TOKENS = 10_000_000  # of a prompt or an output: more is no trace of a server


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: lengths in tokens, arrival in seconds after the start of the replay."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths with the given median and mean, in tokens.

    The median of a log-normal is e^mu and its mean e^(mu + sigma²/2), so that the two published
    numbers fix both parameters. Raises `ConfigError` unless 0 < p50 <= mean.
    """

    p50: float
    mean: float

    def __post_init__(self) -> None:
        if not 0.0 < self.p50 <= self.mean:
            raise ConfigError(
                f"a log-normal needs 0 < median <= mean, got {self.p50} and {self.mean}"
            )

    @property
    def mu(self) -> float:
        return math.log(self.p50)

    @property
    def sigma(self) -> float:
        return math.sqrt(2.0 * math.log(self.mean / self.p50))

    def scaled(self, factor: float) -> LogNormal:
        """The same shape (sigma) with every length multiplied by `factor`."""
        return LogNormal(self.p50 * factor, self.mean * factor)

    def sample(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        """`size` float64 lengths, neither rounded nor clipped."""
        return rng.lognormal(self.mu, self.sigma, size)


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Joint model of a trace's lengths; prompt and output are drawn independently.

    `max_prompt` and `max_output` are where the published trace ends: draws are clipped there.
    """

    prompt: LogNormal
    output: LogNormal
    max_prompt: int
    max_output: int

    def scaled(self, factor: float) -> LengthModel:
        """The model for a smaller (or larger) server: lengths and their limits are multiplied."""
        return LengthModel(
            self.prompt.scaled(factor),
            self.output.scaled(factor),
            max(1, round(self.max_prompt * factor)),
            max(1, round(self.max_output * factor)),
        )

    def generate(self, count: int, seed: int) -> list[LoadRequest]:
        """`count` requests, all arriving at 0; the same seed gives the same requests."""
        rng = np.random.default_rng(seed)
        prompts = _whole(self.prompt.sample(rng, count), self.max_prompt)
        outputs = _whole(self.output.sample(rng, count), self.max_output)
        return [LoadRequest(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


# The conversation trace of 2023, 19,366 requests:
#            mean    p50   p99 published / fitted   max    mu     sigma
#   prompt   1155   1020        4142 / 3253        14050   6.928  0.499
#   output    211    129         601 / 1297         1000   4.860  0.992
# Mean and median fit by construction. The tails do not: real prompts reach further than a
# log-normal, real outputs stop earlier. Clipping at 1000 takes about 5% off the mean output.
AZURE_CONV_2023 = LengthModel(
    prompt=LogNormal(p50=1020, mean=1155),
    output=LogNormal(p50=129, mean=211),
    max_prompt=14050,
    max_output=1000,
)


def read_azure_csv(
    path: Path, limit: int | None = None, longest: int | None = None
) -> list[LoadRequest]:
    """The first `limit` rows of an Azure trace, in order of arrival; the first arrives at 0.

    longest: rows of more prompt and output tokens than that are left out.

    Takes the 2023 files and the 2024 week, whose timestamps carry a time zone (one without is
    read as UTC). Lengths of 0 become 1. Raises `ConfigError` naming the file and line.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in TRACE_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: not an Azure trace, it lacks {', '.join(missing)}")
            for row in reader:
                if len(rows) == limit:
                    break
                try:
                    stamp, *lengths = (row[name] or "" for name in TRACE_COLUMNS)
                    prompt, output = map(_traced_length, lengths)
                    if longest is None or prompt + output <= longest:
                        rows.append((_timestamp(stamp), prompt, output))
                except ValueError as error:
                    raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: the trace holds no requests")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [
        LoadRequest(max(1, prompt), max(1, output), (stamp - start).total_seconds())
        for stamp, prompt, output in rows
    ]


def scale_lengths(load: Sequence[LoadRequest], factor: float) -> list[LoadRequest]:
    """Multiply all lengths by `factor` (at least 1 token each is left)."""
    return [
        dataclasses.replace(
            request,
            prompt_tokens=max(1, round(request.prompt_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
        )
        for request in load
    ]


def clip_lengths(load: Sequence[LoadRequest], max_model_len: int) -> tuple[list[LoadRequest], int]:
    """Cut requests to fit `max_model_len` tokens of prompt and output; also counts the cut ones.

    The output is kept up to half of the room, the prompt gives way to the rest.
    """
    if max_model_len < 2:
        raise ConfigError(f"--max-model-len must be at least 2, got {max_model_len}")
    clipped = []
    for request in load:
        if request.prompt_tokens + request.output_tokens > max_model_len:
            room = max(max_model_len // 2, max_model_len - request.prompt_tokens)
            output = min(request.output_tokens, room)
            prompt = min(request.prompt_tokens, max_model_len - output)
            request = dataclasses.replace(request, prompt_tokens=prompt, output_tokens=output)
        clipped.append(request)
    return clipped, sum(old != new for old, new in zip(load, clipped, strict=True))


def arrive_at_once(load: Sequence[LoadRequest]) -> list[LoadRequest]:
    """All requests at second 0: the server is saturated from the start."""
    return [dataclasses.replace(request, arrival_s=0.0) for request in load]


def arrive_poisson(load: Sequence[LoadRequest], rate: float, seed: int) -> list[LoadRequest]:
    """Exponential gaps with a mean of 1/`rate` seconds; the first request arrives at 0."""
    _require_rate(rate)
    gaps = np.random.default_rng([seed, 1]).exponential(1.0 / rate, len(load))
    gaps[:1] = 0.0
    return [
        dataclasses.replace(request, arrival_s=float(arrival))
        for request, arrival in zip(load, np.cumsum(gaps), strict=True)
    ]


def arrive_as_traced(load: Sequence[LoadRequest], rate: float) -> list[LoadRequest]:
    """The trace's own arrivals with time stretched or compressed to a mean of `rate` per second.

    Bursts keep their shape, which Poisson arrivals lose. An infinite rate keeps the trace's time.
    """
    if math.isinf(rate):
        return list(load)
    _require_rate(rate)
    span = load[-1].arrival_s - load[0].arrival_s if load else 0.0
    factor = (len(load) - 1) / (rate * span) if span > 0.0 else 0.0
    return [dataclasses.replace(item, arrival_s=item.arrival_s * factor) for item in load]


def draw_prompts(load: Sequence[LoadRequest], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids below `vocab_size`, of exactly each request's prompt length.

    Every prompt is drawn anew, so that no two share a prefix that a cache could reuse.
    """
    if vocab_size < 2:
        raise ConfigError(f"--vocab-size must be at least 2, got {vocab_size}")
    rng = np.random.default_rng([seed, 2])
    low = min(FIRST_ORDINARY_ID, vocab_size // 2)
    return [rng.integers(low, vocab_size, request.prompt_tokens).tolist() for request in load]


def _timestamp(text: str) -> datetime:
    # The 2023 files write seven decimals of a second; fromisoformat drops what is beyond six.
    stamp = datetime.fromisoformat(text.strip())
    return stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)


def _traced_length(text: str) -> int:
    """Raises `ValueError`."""
    length = int(text)
    if not 0 <= length <= MAX_TRACED_TOKENS:
        raise ValueError(f"{length} is not a number of tokens up to {MAX_TRACED_TOKENS}")
    return length


def _whole(lengths: npt.NDArray[np.float64], limit: int) -> npt.NDArray[np.int64]:
    return np.clip(np.rint(lengths), 1, limit).astype(np.int64)


def _require_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0.0):
        raise ConfigError(f"--request-rate must be a positive number or inf, got {rate}")
