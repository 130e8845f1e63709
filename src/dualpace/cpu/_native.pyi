"""Types of the C++ extension (csrc/bindings*.cpp). bfloat16 arrays travel as uint16."""

from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualpace.assist._mailbox import Mailbox, Waited

# Writable bytes.
Memory = bytearray | memoryview | mmap | NDArray[np.uint8]

def supported_isas() -> list[str]: ...

class Sampling:
    def __init__(
        self,
        *,
        temperature: NDArray[np.float64],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float64],
        min_p: NDArray[np.float64],
        penalties: NDArray[np.float64],
        seed: NDArray[np.uint64],
        banned_offsets: NDArray[np.int64],
        banned: NDArray[np.int32],
        bias_offsets: NDArray[np.int64],
        biased: NDArray[np.int32],
        biases: NDArray[np.float64],
        seen_offsets: NDArray[np.int64],
        seen: NDArray[np.int32],
        seen_counts: NDArray[np.int32],
        wants_logprobs: NDArray[np.bool_],
    ) -> None: ...

class Engine:
    def __init__(self, cpu_ids: Sequence[int], isa: str = "auto") -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def linear(
        self,
        x: NDArray[np.float32],
        weight: NDArray[Any],
        bias: NDArray[np.float32] | None,
        out: NDArray[np.float32],
    ) -> None: ...
    def rms_norm(
        self,
        x: NDArray[np.float32],
        weight: NDArray[np.float32],
        eps: float,
        out: NDArray[np.float32],
    ) -> None: ...
    def rope(
        self, x: NDArray[np.float32], cosine: NDArray[np.float32], sine: NDArray[np.float32]
    ) -> None: ...
    def attention(
        self,
        query: NDArray[np.float32],
        arena: Memory,
        dtype: str,
        num_layers: int,
        layer: int,
        num_kv_heads: int,
        page_tokens: int,
        positions: NDArray[np.int64],
        page_offsets: NDArray[np.int64],
        pages: NDArray[np.int32],
        out: NDArray[np.float32],
    ) -> None: ...
    def sample(
        self,
        logits: NDArray[np.float32],
        positions: NDArray[np.int64],
        sampling: Sampling,
        out: NDArray[np.int32],
        logprobs: NDArray[np.float64] | None,
    ) -> None: ...

class ModelConfig:
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        inv_freq: Sequence[float],
        tie_embeddings: bool,
        qkv_bias: bool,
        qk_norm: bool,
        dtype: str,
    ) -> None: ...

class Model:
    def __init__(self, engine: Engine, config: ModelConfig, with_weights: bool = True) -> None: ...
    def load(self, name: str, layer: int, array: NDArray[Any]) -> None: ...
    def missing(self) -> list[str]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def weight_pages(self) -> str: ...
    def decode(
        self,
        arena: Memory,
        page_tokens: int,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int64],
        page_offsets: NDArray[np.int64],
        pages: NDArray[np.int32],
        sampling: Sampling,
        out: NDArray[np.int32],
        logprobs: NDArray[np.float64] | None,
        logits: NDArray[np.float32] | None,
    ) -> None: ...
    def decode_assisted(
        self,
        mailbox: Mailbox,
        iteration: int,
        slot_rows: Sequence[int],
        rules: Sequence[bytes],
        arena: Memory,
        page_tokens: int,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int64],
        page_offsets: NDArray[np.int64],
        pages: NDArray[np.int32],
        temperatures: NDArray[np.float64],
        seeds: NDArray[np.uint64],
        out: NDArray[np.int32],
    ) -> Waited: ...

def map_shared(descriptor: int, size: int) -> NDArray[np.uint8]: ...
def map_private(size: int) -> NDArray[np.uint8]: ...
def prepare_arena(engine: Engine, buffer: Memory, offset: int, length: int) -> str: ...
def describe_pages(buffer: Memory) -> str: ...

class LinearBench:
    def __init__(self, engine: Engine, memory: Memory, n: int, k: int, swiglu: bool) -> None: ...
    @property
    def copies(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def set_input(self, x: NDArray[np.float32]) -> None: ...
    def run(self, copy: int) -> float: ...
    def output(self, out: NDArray[np.float32]) -> None: ...
    def weight_row(self, copy: int, row: int, out: NDArray[np.float32]) -> None: ...

class AttentionBench:
    def __init__(
        self,
        engine: Engine,
        arena: Memory,
        num_layers: int,
        num_kv_heads: int,
        page_tokens: int,
        query: NDArray[np.float32],
        positions: NDArray[np.int64],
        page_offsets: NDArray[np.int64],
        pages: NDArray[np.int32],
    ) -> None: ...
    def run(self, layer: int) -> float: ...
    def output(self, out: NDArray[np.float32]) -> None: ...

def time_read(engine: Engine, buffer: Memory) -> float: ...
def time_barrier(engine: Engine, rounds: int) -> float: ...
def time_sampling(engine: Engine, rows: int, vocab: int) -> float: ...
def fill_bfloat16(engine: Engine, buffer: Memory, wide: bool) -> None: ...
