"""What a client may ask of decoding, and the smaller form of it that travels to the engines.

`SamplingParams` is the public face, field for field as vLLM names them. `DecodeParams` is what an
engine needs to sample and to know when a request ends: seed drawn, end-of-sequence ids merged into
the stop ids, lengths resolved. Stop *strings* stay with the frontend, which alone sees text.
"""

from __future__ import annotations

import math
import secrets

import msgspec

from dualpace.core.errors import RequestError
from dualpace.core.logprobs import MAX_LOGPROBS

MAX_STOP_STRINGS = 16
MAX_BIASED_IDS = 300  # OpenAI's limit
MAX_BIAS = 100.0
MAX_PENALTY = 2.0


class DecodeParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sampling and ending rules of one request, resolved. Identical on every engine."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # each id once
    logprobs: int | None = None  # likeliest tokens to report; None: no logprobs at all

    @property
    def penalizes(self) -> bool:
        """True if the next token depends on which ones came before, by other than the model."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SamplingParams(msgspec.Struct, kw_only=True):
    """Decoding options of one request.

    Raises `RequestError` (a `ValueError`) that names the field when a value cannot work.
    `top_k` 0 or -1 means all tokens; `temperature` 0 means greedy; `max_tokens` None means up to
    the model's maximum length; `logprobs` 0 means the sampled token's alone, None none.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        self.verify()

    def verify(self) -> None:
        """Raise `RequestError` on the first field whose value cannot work."""
        _require(1 <= self.n <= 128, "n", "must be between 1 and 128", self.n)
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
            "temperature", "must be between 0 and 100", self.temperature,
        )  # fmt: skip
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]", self.top_p)
        _require(
            0 <= self.top_k < 2**31, "top_k", "must be -1, 0 (all tokens) or positive", self.top_k
        )
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(
                -MAX_PENALTY <= penalty <= MAX_PENALTY, name, "must be between -2 and 2", penalty
            )
        _require(
            0.0 < self.repetition_penalty < math.inf,
            "repetition_penalty", "must be greater than 0", self.repetition_penalty,
        )  # fmt: skip
        bias = self.logit_bias or {}
        _require(
            len(bias) <= MAX_BIASED_IDS, "logit_bias", f"takes at most {MAX_BIASED_IDS} ids",
            len(bias),
        )  # fmt: skip
        for token_id, value in bias.items():
            _require(
                -MAX_BIAS <= value <= MAX_BIAS,
                "logit_bias", f"of id {token_id} must be between -100 and 100", value,
            )  # fmt: skip
        if self.logprobs is not None:
            _require(
                0 <= self.logprobs <= MAX_LOGPROBS,
                "logprobs", f"must be between 0 and {MAX_LOGPROBS}", self.logprobs,
            )  # fmt: skip
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits", self.seed)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens", f"must not exceed max_tokens={self.max_tokens}", self.min_tokens,
            )  # fmt: skip
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative", self.min_tokens)
        stop = self.stop or []
        _require(
            len(stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings",
            len(stop),
        )  # fmt: skip
        _require(all(stop), "stop", "must not contain an empty string", stop)

    def resolve(self, *, eos_ids: tuple[int, ...], room: int, choice: int = 0) -> DecodeParams:
        """Settle what was left open.

        eos_ids: the model's end-of-sequence ids; room: tokens that still fit under the maximum
        model length; choice: which of the `n` choices this is (each gets its own noise).
        """
        seed = secrets.randbits(64) if self.seed is None else self.seed % 2**64
        stop_ids = set(self.stop_token_ids or ())
        if not self.ignore_eos:
            stop_ids.update(eos_ids)
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        return DecodeParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(seed + choice) % 2**64,
            stop_ids=tuple(sorted(stop_ids)),
            min_tokens=min(self.min_tokens, max_tokens),
            max_tokens=max_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            logprobs=self.logprobs,
        )


def _require(ok: bool, param: str, rule: str, got: object) -> None:
    if not ok:
        raise RequestError(f"{param} {rule}, got {got!r}", param=param)
