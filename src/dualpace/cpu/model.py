"""The CPU engine's model: weights by canonical name into the C++ engine, rows in, token ids out.

Knows shapes, NumPy arrays and core types; knows no checkpoint format, no torch, and nothing of
who owns a page. Names: `embed_tokens` [V, H], `norm` [H], `lm_head` [V, H] unless tied, and under
`layers.{i}.`: `input_norm`, `post_norm` [H], `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`,
`up_proj`, `down_proj` [out, in], `q_bias`, `k_bias`, `v_bias` [out], `q_norm`, `k_norm` [head_dim].
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualpace.assist.mailbox import Mailbox
from dualpace.core.config import DType, format_size
from dualpace.core.errors import ConfigError, HardwareError, ModelError
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import BatchRow, Route, StepResult
from dualpace.cpu import _native
from dualpace.cpu.assisted import AssistedDecoder
from dualpace.cpu.sampling import logprobs_buffer, ragged, read_logprobs, sampling_arrays

logger = logging.getLogger(__name__)

_LAYER_NAME = re.compile(r"layers\.(\d+)\.(\w+)")


class Decoded(NamedTuple):
    """What one iteration yields for M rows."""

    token_ids: NDArray[np.int32]  # [M]
    logits: NDArray[np.float32] | None  # [M, vocab_size], if asked for
    logprobs: dict[int, TokenLogprobs]  # of the rows that asked, by index


class CpuModel:
    """A decoder whose weights live in host memory, packed for the kernels of this machine.

    weights: (name, array or what NumPy makes one of) pairs in any order, float32 or bfloat16
    (`ml_dtypes`); they are converted to `dtype`, that of weights and KV cache, and not kept. None
    for a model without weights, all of whose iterations are assisted.
    cores: CPU ids, one pinned thread each. isa: one of `core.config.ISAS`. mailbox: the CPU's end
    of the one through which the GPU engine assists, if it can.

    Raises `ModelError` for a missing, unknown, repeated or wrongly shaped tensor, `ConfigError` for
    an unknown instruction set or a CPU that is not available, `HardwareError` for an instruction
    set that this machine lacks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[tuple[str, ArrayLike]] | None,
        *,
        dtype: DType,
        cores: Sequence[int],
        isa: str = "auto",
        mailbox: Mailbox | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        try:
            self._engine = _native.Engine(list(cores), isa)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except RuntimeError as error:
            raise HardwareError(str(error)) from None
        try:
            config = _native_config(spec, dtype)
            self._native = _native.Model(self._engine, config, weights is not None)
        except ValueError as error:
            raise ModelError(str(error)) from None
        self._assisted: AssistedDecoder | None = None
        if mailbox is not None:
            self._assisted = AssistedDecoder(self._native, mailbox, spec.vocab_size)
        if weights is None:
            logger.info("no weights on the host: the GPU engine computes all dense layers")
            return
        for name, tensor in weights:
            self._load(name, np.asarray(tensor))
        if missing := self._native.missing():
            raise ModelError(
                f"missing tensors: {', '.join(missing[:5])}{', …' * (len(missing) > 5)}"
            )
        size = format_size(self._native.weight_bytes)
        logger.info("weights: %s in %s", size, self._native.weight_pages)

    @property
    def isa(self) -> str:
        """The instruction set in use, "auto" resolved."""
        return self._engine.isa

    @property
    def num_threads(self) -> int:
        return self._engine.num_threads

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of a KV page of so many tokens."""
        return self.spec.page_bytes(page_tokens, 2 if self.dtype == "bfloat16" else 4)

    def prepare_arena(self, arena: _native.Memory, offset: int, length: int) -> str:
        """Give these bytes of a shared mapping their memory, in huge pages if it can be had.

        Returns what was got, such as "2 MiB pages". Runs on the engine's threads between
        iterations; what is stored stays, whoever writes meanwhile. Releases the GIL.
        """
        return _native.prepare_arena(self._engine, arena, offset, length)

    def read_seconds(self, memory: _native.Memory) -> float:
        """Seconds in which the engine's threads read `memory`. Releases the GIL."""
        return _native.time_read(self._engine, memory)

    def decode(
        self,
        rows: Sequence[BatchRow],
        arena: _native.Memory,
        page_tokens: int,
        *,
        route: Route = "local",
        return_logits: bool = False,
    ) -> Decoded:
        """Run one iteration, one new token per row, and sample every row. Releases the GIL.

        arena: writable bytes of the host KV pool, `dtype`,
        `[page][layer][2][kv_head][page_tokens][head_dim]`. route: who computes the dense part; from
        iteration to iteration it may change. return_logits: on the local route only. Raises
        `ValueError` for a token id, position or page id out of range, and for a route that the
        model lacks weights or a mailbox for; `AssistError` where the GPU engine does not do its
        part.
        """
        if any(len(row.tokens) != 1 for row in rows):
            raise ValueError("the CPU engine decodes exactly one token per row")
        if route != "local" and rows:
            if self._assisted is None or return_logits:
                raise ValueError(f"route {route}: there is no mailbox, or logits are asked for")
            slots = 2 if route == "assist2" else 1
            try:
                tokens, logprobs = self._assisted.decode(rows, arena, page_tokens, slots)
            except OverflowError as error:
                raise ValueError(f"a row's number is out of range: {error}") from None
            return Decoded(tokens, None, logprobs)
        logits = np.empty((len(rows), self.spec.vocab_size), np.float32) if return_logits else None
        return self._run(rows, (), arena, page_tokens, logits)

    def attend(
        self,
        step: int,
        halves: Sequence[Sequence[BatchRow]],
        arena: _native.Memory,
        page_tokens: int,
    ) -> None:
        """Attend for the GPU engine's gated step of that number. Releases the GIL.

        halves: up to two, in the order of the mailbox's slots, of rows with one token each. Arena
        and errors as in `decode`.
        """
        if self._assisted is None:
            raise ValueError("there is no mailbox for gated steps")
        try:
            self._assisted.attend(step, halves, arena, page_tokens)
        except OverflowError as error:
            raise ValueError(f"a row's number is out of range: {error}") from None

    def step(self, rows: Sequence[BatchRow], arena: _native.Memory, page_tokens: int) -> StepResult:
        """Run rows of any number of tokens: decodes, and chunks of prompts. Releases the GIL.

        Yields the token of each row that samples, None for the others. Arena and errors as in
        `decode`.
        """
        places = [place for place, row in enumerate(rows) if row.sample]
        done = self._run([rows[place] for place in places], rows, arena, page_tokens, None)
        tokens: list[int | None] = [None] * len(rows)
        for place, token in zip(places, done.token_ids.tolist(), strict=True):
            tokens[place] = token
        return StepResult(tokens, {places[i]: told for i, told in done.logprobs.items()})

    def _run(
        self,
        sampled: Sequence[BatchRow],
        chunks: Sequence[BatchRow],
        arena: _native.Memory,
        page_tokens: int,
        logits: NDArray[np.float32] | None,
    ) -> Decoded:
        """The tokens after each of `sampled`; of `chunks` all is computed that no row samples."""
        out = np.empty(len(sampled), np.int32)
        logprobs = logprobs_buffer(sampled, self.spec.vocab_size)
        tokens = [row.tokens[-1] for row in sampled]
        positions = [row.end - 1 for row in sampled]
        tables = [row.pages for row in sampled]
        for row in chunks:
            count = len(row.tokens) - row.sample
            tokens += row.tokens[:count]
            positions += range(row.start, row.start + count)
            tables += [row.pages] * count
        try:
            page_offsets, pages = ragged(tables)
            self._native.decode(
                arena, page_tokens, np.array(tokens, np.int32), np.array(positions, np.int64),
                page_offsets, pages, sampling_arrays(sampled), out, logprobs, logits,
            )  # fmt: skip
        except OverflowError as error:
            raise ValueError(f"a row's number is out of range: {error}") from None
        return Decoded(out, logits, read_logprobs(sampled, logprobs))

    def _load(self, name: str, array: NDArray[Any]) -> None:
        match = _LAYER_NAME.fullmatch(name)
        layer, short = (int(match[1]), match[2]) if match else (-1, name)
        if array.dtype == ml_dtypes.bfloat16:
            array = array.view(np.uint16)
        elif array.dtype != np.float32:
            raise ModelError(f"tensor {name} is {array.dtype}; float32 or bfloat16 expected")
        try:
            self._native.load(short, layer, np.ascontiguousarray(array))
        except ValueError as error:
            raise ModelError(f"{error} {list(array.shape)}") from None


def _native_config(spec: ModelSpec, dtype: DType) -> _native.ModelConfig:
    return _native.ModelConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        inv_freq=list(spec.inv_freq),
        tie_embeddings=spec.tie_embeddings,
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm,
        dtype=dtype,
    )
