"""Measures the CPU engine's kernels, each beside the read bandwidth of the memory that it reads.

A bandwidth that was measured yesterday, or on another kind of memory, says nothing about a kernel:
hosts are shared, and pages of 2 MiB read differently from pages of 4 KiB. So every kernel takes
turns with a plain reading loop, on the engine's own pool, over an arena and weights prepared as the
engine prepares them. Knows no torch; whoever wants it compared passes in a function.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpace.core.config import format_size
from dualpace.core.errors import ConfigError, HardwareError
from dualpace.cpu import _native
from dualpace.cpu.kernel_reference import attention_error, linear_error, rms_norm_error, rope_error
from dualpace.cpu.memory import available_memory, create_arena, map_arena
from dualpace.cpu.model_bench import LLAMA_8B, ModelBench

GIB = 2**30
KV_HEADS, HEAD_DIM, PAGE_TOKENS = 8, 128, 32
LAYER_PAGE_BYTES = 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 2
HIDDEN, INNER, VOCAB = 4096, 14336, 128256
BATCHES = ((64, 128), (64, 1024), (64, 4096), (1, 32768))  # sequences, tokens of each
GROUPS = (4, 8)
ROUNDS = 3
TORCH_BYTES = 5 * GIB // 2  # what the process that runs torch takes
SETTLE_S = 0.02  # after which no pool spins any more

# (n, k, m) to seconds of torch's eager and prepacked linear layer; None for what it cannot do.
TorchLinear = Callable[[int, int, int], tuple[float | None, float | None]]
# Called with what comes next, the number of steps done, and the number of all.
OnStep = Callable[[str, int, int], None]


class MemoryReport(msgspec.Struct, frozen=True):
    """Memory that kernels read; read_gb_s is the median of plain reads between all measurements."""

    size: int
    pages: str
    read_gb_s: float
    read_gb_s_least: float
    read_gb_s_most: float


class AttentionPoint(msgspec.Struct, frozen=True):
    """One layer's attention of a batch. fraction: of the bandwidth read in the same turns."""

    sequences: int
    tokens: int
    group: int
    seconds: float
    gb_s: float
    read_gb_s: float
    fraction: float
    relative_l2: float


class LinearPoint(msgspec.Struct, frozen=True):
    """One linear layer with m rows; torch's seconds for the same where it was asked."""

    layer: str
    m: int
    seconds: float
    gb_s: float
    read_gb_s: float
    fraction: float
    tflop_s: float
    relative_l2: float
    torch_eager_seconds: float | None = None
    torch_prepacked_seconds: float | None = None


class OtherPoint(msgspec.Struct, frozen=True):
    name: str
    seconds: float
    relative_l2: float | None = None


class IterationPoint(msgspec.Struct, frozen=True):
    """A whole iteration of a model. roof_seconds: its bytes at the bandwidth of their memory."""

    model: str
    rows: int
    tokens: int
    seconds: float
    weight_bytes: int
    kv_bytes: int
    roof_seconds: float
    fraction: float


class KernelReport(msgspec.Struct, frozen=True):
    isa: str
    threads: int
    barrier_seconds: float
    arena: MemoryReport
    weights: MemoryReport
    attention: list[AttentionPoint]
    linear: list[LinearPoint]
    other: list[OtherPoint]
    iteration: IterationPoint | None
    notes: list[str]


class KernelBench:
    """One run on `cores` (CPU ids). quick: half the memory, fewer sizes, less time for each.

    Raises `ConfigError` and `HardwareError` as `CpuModel` does, and `HardwareError` where there is
    not even memory for a small run.
    """

    def __init__(
        self,
        cores: Sequence[int],
        isa: str = "auto",
        *,
        quick: bool = False,
        torch_linear: TorchLinear | None = None,
        on_step: OnStep = lambda what, done, total: None,
        memory_bytes: int | None = None,
    ) -> None:
        try:
            self.engine = _native.Engine(list(cores), isa)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except RuntimeError as error:
            raise HardwareError(str(error)) from None
        self.cores = tuple(cores)
        self.quick = quick
        self.torch_linear = torch_linear
        self.on_step = on_step
        self.notes: list[str] = []
        self.seconds_per_round = 0.12 if quick else 0.4
        self.rows = (1, 16, 64, 256) if quick else (1, 8, 16, 32, 64, 128, 256)
        self.size = memory_bytes or self._choose_size()
        self._reads: dict[int, list[float]] = {}  # GB/s by memory
        self._rng = np.random.default_rng(0)
        self._steps = count()
        linears = (3 if torch_linear is None else 5) * len(self.rows)
        self._total_steps = 2 + len(GROUPS) * len(BATCHES) + linears + 2 + (not quick)

    def run(self) -> KernelReport:
        """Measure everything, in about a minute (quick) to four."""
        self._step("memory for the KV arena")
        descriptor = create_arena(self.size)
        self.arena = map_arena(descriptor, self.size)
        os.close(descriptor)
        arena_pages = _native.prepare_arena(self.engine, self.arena, 0, self.size)
        _native.fill_bfloat16(self.engine, self.arena, True)
        self._step("memory for weights")
        self.weights = _native.map_private(self.size)
        _native.fill_bfloat16(self.engine, self.weights, False)
        attention = [
            self._attention(sequences, tokens, group)
            for group in GROUPS
            for sequences, tokens in BATCHES
        ]
        linear = [
            point
            for n, k, swiglu in (
                (2 * INNER, HIDDEN, False), (HIDDEN, INNER, False), (2 * INNER, HIDDEN, True),
            )
            for point in self._linear(n, k, swiglu, self.rows)
        ]  # fmt: skip
        other = self._other()
        barrier = _native.time_barrier(self.engine, 20_000)
        iteration = self._iteration()
        return KernelReport(
            isa=self.engine.isa,
            threads=self.engine.num_threads,
            barrier_seconds=barrier,
            arena=self._memory_report(self.arena, arena_pages),
            weights=self._memory_report(self.weights, _native.describe_pages(self.weights)),
            attention=attention,
            linear=linear,
            other=other,
            iteration=iteration,
            notes=self.notes,
        )

    def _choose_size(self) -> int:
        """Bytes of the arena, and as many of weights."""
        wanted = (2 if self.quick else 4) * GIB
        fits = int(available_memory() * 0.9 - TORCH_BYTES) // 2 // (GIB // 4) * (GIB // 4)
        if fits < GIB // 2:
            raise HardwareError(f"too little memory is left: {format_size(available_memory())}")
        if fits < wanted:
            self.notes.append(f"memory is short: {format_size(fits)} instead of 4 GiB of each kind")
        return min(wanted, fits)

    def _step(self, what: str) -> None:
        self.on_step(what, next(self._steps), self._total_steps)

    # -- taking turns ----------------------------------------------------------------------------

    def _read(self, memory: NDArray[np.uint8]) -> float:
        """GB/s of reading all of `memory` once; also empties the caches of what a kernel left."""
        speed = memory.nbytes / _native.time_read(self.engine, memory) / 1e9
        self._reads.setdefault(memory.ctypes.data, []).append(speed)
        return speed

    def _alternate(
        self, memory: NDArray[np.uint8], call: Callable[[int], float], calls: int
    ) -> tuple[float, float]:
        """Seconds of a call, and GB/s of plain reading, in turns.

        call: runs number 0 … calls-1 once and returns its seconds; each reads another part of
        `memory`. A turn is as many calls as there is time for, at most all.
        """
        call(0)
        means, speeds = [], []
        following = 0
        for _ in range(ROUNDS):
            speeds.append(self._read(memory))
            times: list[float] = []
            while len(times) < calls and sum(times) < self.seconds_per_round:
                times.append(call(following))
                following = (following + 1) % calls
            means.append(statistics.fmean(times))
        return statistics.median(means), statistics.median(speeds)

    def _memory_report(self, memory: NDArray[np.uint8], pages: str) -> MemoryReport:
        speeds = self._reads[memory.ctypes.data]
        return MemoryReport(
            memory.nbytes, pages, statistics.median(speeds), min(speeds), max(speeds)
        )

    # -- attention -------------------------------------------------------------------------------

    def _attention(self, sequences: int, tokens: int, group: int) -> AttentionPoint:
        self._step(f"attention {sequences} × {tokens:,} tokens, G = {group}")
        per_row = tokens // PAGE_TOKENS
        layers = self.size // (sequences * per_row * LAYER_PAGE_BYTES)
        if layers == 0:  # memory is short: fewer sequences, or a shorter one
            sequences = max(1, min(sequences, self.size // (per_row * LAYER_PAGE_BYTES)))
            per_row = min(per_row, self.size // LAYER_PAGE_BYTES)
            layers = 1
        pages = self._rng.permutation(sequences * per_row).astype(np.int32)
        query = self._rng.standard_normal((sequences, KV_HEADS * group, HEAD_DIM), dtype=np.float32)
        bench = _native.AttentionBench(
            self.engine, self.arena, layers, KV_HEADS, PAGE_TOKENS, query,
            np.full(sequences, per_row * PAGE_TOKENS - 1, np.int64),
            np.arange(sequences + 1, dtype=np.int64) * per_row, pages,
        )  # fmt: skip
        seconds, speed = self._alternate(self.arena, bench.run, layers)
        bench.run(layers - 1)
        out = np.empty_like(query)
        bench.output(out)
        cache = self.arena[: len(pages) * layers * LAYER_PAGE_BYTES].view(ml_dtypes.bfloat16)
        cache = cache.reshape(len(pages), layers, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        error = attention_error(out, query, cache[:, -1], pages.reshape(sequences, per_row))
        gb_s = len(pages) * LAYER_PAGE_BYTES / seconds / 1e9
        return AttentionPoint(
            sequences, per_row * PAGE_TOKENS, group, seconds, gb_s, speed, gb_s / speed, error
        )

    # -- linear layers ---------------------------------------------------------------------------

    def _linear(self, n: int, k: int, swiglu: bool, rows: Sequence[int]) -> list[LinearPoint]:
        bench = _native.LinearBench(self.engine, self.weights, n, k, swiglu)
        name = f"{k}→{n}" + (" SwiGLU" if swiglu else "")
        points = []
        for m in rows:
            self._step(f"linear {name}, M = {m}")
            x = self._rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16).astype(np.float32)
            bench.set_input(x)
            seconds, speed = self._alternate(self.weights, bench.run, bench.copies)
            error = linear_error(bench, x, n, swiglu, self._rng)
            eager = prepacked = None
            if self.torch_linear is not None and not swiglu and n != VOCAB:
                self._step(f"torch {name}, M = {m}")
                time.sleep(SETTLE_S)
                eager, prepacked = self.torch_linear(n, k, m)
                time.sleep(SETTLE_S)
            gb_s = bench.weight_bytes / seconds / 1e9
            points.append(
                LinearPoint(
                    name, m, seconds, gb_s, speed, gb_s / speed,
                    2.0 * m * n * k / seconds / 1e12, error, eager, prepacked,
                )
            )  # fmt: skip
        return points

    # -- the rest --------------------------------------------------------------------------------

    def _other(self) -> list[OtherPoint]:
        x = self._rng.standard_normal((64, HIDDEN), dtype=np.float32)
        out = np.empty_like(x)
        weight = self._rng.standard_normal(HIDDEN, dtype=np.float32)
        seconds = _per_row(lambda: self.engine.rms_norm(x, weight, 1e-5, out), len(x))
        points = [
            OtherPoint("RMS norm of 4096, a row on one thread", seconds,
                       rms_norm_error(out, x, weight, 1e-5))
        ]  # fmt: skip
        heads = self._rng.standard_normal((64 * 40, HEAD_DIM), dtype=np.float32)
        angles = self._rng.standard_normal(HEAD_DIM // 2)
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        rotated = heads.copy()
        self.engine.rope(rotated, cosine, sine)
        error = rope_error(rotated, heads, angles)
        seconds = _per_row(lambda: self.engine.rope(rotated, cosine, sine), 64)
        points.append(OtherPoint("RoPE of 40 heads of 128, a row on one thread", seconds, error))
        if self.size >= HIDDEN * VOCAB * 2:
            head = self._linear(VOCAB, HIDDEN, False, (32,))[0]
            points.append(OtherPoint("LM head of 128256, 32 rows", head.seconds, head.relative_l2))
        self._step("sampling")
        seconds = statistics.median(
            _native.time_sampling(self.engine, 32, VOCAB) for _ in range(ROUNDS)
        )
        points.append(OtherPoint("sampling of 32 rows, top_p 0.95", seconds))
        return points

    def _iteration(self) -> IterationPoint | None:
        if self.quick:
            self.notes.append("no whole iteration of an 8B model with --quick")
            return None
        self._step("a whole iteration of an 8B model")
        needed = LLAMA_8B.num_parameters * 2 + 2 * GIB
        kv_bytes = ModelBench.kv_bytes(LLAMA_8B)
        if available_memory() < needed or self.size < kv_bytes:
            self.notes.append(
                f"no whole iteration of an 8B model: it takes {format_size(needed)} beside the "
                f"arena, {format_size(available_memory())} is left"
            )
            return None
        bench = ModelBench(LLAMA_8B, self.cores, self.engine.isa, self.arena)
        bench.iterate()
        seconds, roofs = [], []
        for _ in range(ROUNDS):
            weights, kv = self._read(self.weights), self._read(self.arena)
            roofs.append(bench.weight_bytes / weights / 1e9 + kv_bytes / kv / 1e9)
            time.sleep(SETTLE_S)
            seconds.append(bench.iterate())
            time.sleep(SETTLE_S)
        measured, roof = statistics.median(seconds), statistics.median(roofs)
        return IterationPoint(
            "Llama-3.1-8B, random weights", bench.rows, bench.tokens, measured,
            bench.weight_bytes, kv_bytes, roof, roof / measured,
        )  # fmt: skip


def _per_row(call: Callable[[], Any], rows: int, repeats: int = 20) -> float:
    """Seconds of a row, as the median of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / rows
