"""Decode steps as CUDA graphs, one for each batch bucket: from token ids to token ids.

A graph holds the whole step: tokens of the step before, embedding, all layers with attention and
KV append, logits, drawing. Graphs run one at a time, so they share one memory pool, one capture
stream (and with it cuBLAS's workspace) and FlashInfer's workspace; what may run beside them must
have its own of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from dualpace.gpu.cuda_layers import Flow, TokenInputs
from dualpace.gpu.draw import draw_arrays
from dualpace.gpu.flashinfer_attention import (
    BlockTables,
    DecodeAttention,
    GraphTables,
    layer_caches,
)
from dualpace.gpu.flashinfer_model import FlashInferModel
from dualpace.gpu.gate import capturing
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.upload import StagedArrays

# Which of them has the faster kernels for a few rows differs from shape to shape.
BLAS_LIBRARIES = ("cublas", "cublaslt")
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    attention: DecodeAttention
    inputs: StagedArrays
    logits: Tensor  # [rows, V]


class DecodeGraphs:
    """Captured for up to `max_rows` rows. `scratch_page` is one that no request uses."""

    def __init__(
        self, model: FlashInferModel, sampled: Tensor, max_rows: int, scratch_page: int
    ) -> None:
        """sampled: int64, tokens by row of the step before; every step overwrites them."""
        self._model = model
        self._sampled = sampled
        self._scratch_page = scratch_page
        self._buckets = [size for size in BUCKETS if size < max_rows] + [max_rows]
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Graph] = {}
        weights = model.layers.weights
        self._logits = torch.empty(
            (max_rows, len(weights.lm_head)), dtype=weights.dtype, device=weights.device
        )
        with capturing("capturing the decode graphs"):
            # The largest first: the smaller ones find their memory in the pool.
            for rows in track(self._buckets[::-1], description="Capturing decode graphs"):
                self._graphs[rows] = self._capture(rows)

    def takes(self, step: StepInput) -> bool:
        """True for a step of decodes on the GPU alone, of no more rows than were captured."""
        rows = len(step.rows)
        return rows <= self._buckets[-1] and step.num_decodes == rows == len(step.sampled_rows)

    def run(self, step: StepInput) -> Tensor:
        """Launch the step; its tokens, drawn without special rules, go to `sampled`.

        Returns the logits [rows, V], which the next step will overwrite.
        """
        rows = len(step.rows)
        bucket = next(size for size in self._buckets if size >= rows)
        graph = self._graphs[bucket]
        pools = self._model.pools
        tables = BlockTables.of(step.spans, pools.page_tokens, len(pools["gpu"]))
        tables = self._fill(graph.inputs, bucket, step, tables)
        graph.inputs.send("indices", len(tables.indices))
        graph.attention.plan_again(tables)
        graph.graph.replay()
        return graph.logits[:rows]

    def _fill(
        self, inputs: StagedArrays, bucket: int, step: StepInput, tables: BlockTables
    ) -> BlockTables:
        """Fill a graph's inputs; rows that it has beyond those of the step decode one token in the
        scratch page. Returns the tables with theirs, as they stand in the inputs."""
        rows, pages = len(step.rows), len(tables.indices)
        end = pages + bucket - rows
        host = inputs.host
        inputs.fill("tokens", step.tokens, rest=0)
        inputs.fill("sources", step.sources, rest=-1)
        inputs.fill("positions", step.positions, rest=0)
        for name, values in draw_arrays(step.rows).items():
            inputs.fill(name, values, rest=0)
        inputs.fill("pages", tables.pages, rest=self._scratch_page)
        inputs.fill("offsets", tables.offsets, rest=0)
        inputs.fill("indptr", tables.indptr)
        host["indptr"][rows:] = np.arange(pages, end + 1)
        inputs.fill("last_page_len", tables.last_page_len, rest=1)
        inputs.fill("indices", tables.indices)
        host["indices"][pages:end] = self._scratch_page
        return BlockTables(
            host["indptr"], host["indices"][:end], host["last_page_len"], host["pages"],
            host["offsets"],
        )  # fmt: skip

    def _capture(self, rows: int) -> _Graph:
        layers, model = self._model.layers, self._model
        weights = layers.weights
        # The rows may name all pages between them; padding names the scratch page once a row.
        inputs = StagedArrays(
            weights.device,
            tokens=(np.int64, rows), sources=(np.int64, rows), positions=(np.int64, rows),
            temperatures=(np.float64, rows), seeds=(np.int64, rows),
            pages=(np.int32, rows), offsets=(np.int32, rows),
            indptr=(np.int32, rows + 1), last_page_len=(np.int32, rows),
            indices=(np.int32, len(layers.pool) + rows),
        )  # fmt: skip
        at = inputs.device
        where = GraphTables(at["indptr"], at["indices"], at["last_page_len"])
        attention = DecodeAttention(
            layers.spec, model.pools.page_tokens, model.workspace, graph=where
        )
        nothing = StepInput([], [], [], *(np.empty(0, dtype=np.int64) for _ in range(5)))
        tables = self._fill(inputs, rows, nothing, BlockTables.of([], model.pools.page_tokens, 0))
        inputs.send("indices", len(tables.indices))
        tokens = TokenInputs(**{name: at[name] for name in TokenInputs.__dataclass_fields__})
        logits = self._logits[:rows]
        caches = layer_caches(layers.pool)

        def body() -> None:
            from dualpace.gpu.triton_kernels import draw

            flow = Flow.new(layers.spec, rows, weights.device)
            layers.enter(tokens, self._sampled, flow)
            attend = attention.begin(flow.query, flow.attended)
            for index, kv in enumerate(caches):
                attend(kv)
                hidden = layers.leave(index, tokens, flow)
            torch.mm(hidden, weights.lm_head.t(), out=logits)
            rules = (at["temperatures"], at["seeds"], at["positions"] + 1)
            draw(logits, *rules, self._sampled)

        attention.plan(tables, at["indices"][: len(tables.indices)])
        timed = [self._timed(library, body) for library in BLAS_LIBRARIES]
        graph, _ = min(timed, key=lambda each: each[1])
        return _Graph(graph, attention, inputs, logits)

    def _timed(self, library: str, body: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, float]:
        """Captured with that library's matrix products, and the seconds of a replay."""
        chosen = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                body()  # kernels are compiled and libraries set up outside the capture
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                body()
                graph.capture_end()
                seconds = replay_seconds(graph)
            torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            torch.backends.cuda.preferred_blas_library(chosen)
        return graph, seconds


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """The shortest of a few replays, one of which is a warm-up."""
    times: list[float] = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times[1:])
