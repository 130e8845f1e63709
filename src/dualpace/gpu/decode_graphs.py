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
import numpy.typing as npt
import torch
from rich.progress import track
from torch import Tensor

from dualpace.gpu.cuda_layers import Flow, TokenInputs
from dualpace.gpu.draw import draw_arrays
from dualpace.gpu.flashinfer_attention import BlockTables, DecodeAttention
from dualpace.gpu.flashinfer_model import FlashInferModel
from dualpace.gpu.gate import device_alone
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.upload import pack, padded, send, views

# Which of them has the faster kernels for a few rows differs from shape to shape.
BLAS_LIBRARIES = ("cublas", "cublaslt")
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    attention: DecodeAttention
    inputs: Tensor  # uint8, arrays of `_arrays` behind each other
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
        with device_alone("capturing the decode graphs"):
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
        tables = tables.padded(bucket, self._scratch_page)
        arrays = self._arrays(step, tables, bucket)
        packed = pack(arrays)
        send(packed, graph.inputs[: len(packed)])
        indices = views(graph.inputs, arrays)["indices"]
        graph.attention.plan(tables, indices)
        graph.graph.replay()
        return graph.logits[:rows]

    def _arrays(
        self, step: StepInput, tables: BlockTables, bucket: int
    ) -> dict[str, npt.NDArray[np.generic]]:
        """A graph's inputs, all but the last of a size that the bucket tells."""
        more = (0, bucket - len(step.rows))
        drawn = draw_arrays(step.rows)
        return {
            "tokens": np.pad(step.tokens, more),
            "sources": np.pad(step.sources, more, constant_values=-1),
            "positions": np.pad(step.positions, more),
            "temperatures": np.pad(drawn["temperatures"], more),
            "seeds": np.pad(drawn["seeds"], more),
            "pages": tables.pages,
            "offsets": tables.offsets,
            "indices": tables.indices,
        }

    def _capture(self, rows: int) -> _Graph:
        layers, model = self._model.layers, self._model
        weights = layers.weights
        # The rows may name all pages between them; padding names the scratch page once a row.
        pages = len(layers.pool) + rows
        attention = DecodeAttention(
            layers.spec, model.pools.page_tokens, model.workspace, rows, pages
        )
        nothing = StepInput([], [], [], *(np.empty(0, dtype=np.int64) for _ in range(5)))
        tables = BlockTables.of([], model.pools.page_tokens, 0).padded(rows, self._scratch_page)
        arrays = self._arrays(nothing, tables, rows)
        packed = pack(arrays)
        size = len(packed) + padded(4 * (pages - rows))
        inputs = torch.zeros(size, dtype=torch.uint8, device=weights.device)
        send(packed, inputs[: len(packed)])
        at = views(inputs, arrays)
        tokens = TokenInputs(**{name: at[name] for name in TokenInputs.__dataclass_fields__})
        logits = self._logits[:rows]

        def body() -> None:
            from dualpace.gpu.triton_kernels import draw

            flow = Flow.new(layers.spec, rows, weights.device)
            layers.enter(tokens, self._sampled, flow)
            for index in range(layers.spec.num_layers):
                attention.run(flow.query, layers.pool[:, index], flow.attended)
                hidden = layers.leave(index, tokens, flow)
            torch.mm(hidden, weights.lm_head.t(), out=logits)
            drawn = draw(logits, at["temperatures"], at["seeds"], at["positions"] + 1)
            self._sampled[:rows] = drawn

        attention.plan(tables, at["indices"])
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
