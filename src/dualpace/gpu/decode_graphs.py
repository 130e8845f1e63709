"""Decode steps as CUDA graphs, one for each batch bucket: from token ids to token ids.

A graph holds the whole step: tokens of the step before, embedding, all layers with attention and
KV append, logits, drawing. Graphs run one at a time, so they share one memory pool, one capture
stream (and with it cuBLAS's workspace) and FlashInfer's workspace; what may run beside them must
have its own of each.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from dualpace.gpu.draw import draw_arrays
from dualpace.gpu.flashinfer_attention import BlockTables, DecodeAttention
from dualpace.gpu.flashinfer_model import FlashInferModel
from dualpace.gpu.gate import device_alone
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.torch_model import with_previous
from dualpace.gpu.upload import pack, padded, views

logger = logging.getLogger(__name__)

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
        tables = BlockTables.of(
            step.spans, self._model.pools.page_tokens, self._scratch_page
        ).padded(bucket, self._scratch_page)
        arrays = self._arrays(step, tables, bucket)
        packed = pack(arrays)
        graph.inputs[: len(packed)].copy_(packed, non_blocking=True)
        indices = views(graph.inputs, arrays)["indices"]
        graph.attention.plan(tables, indices, self._model.weights.dtype)
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
        model = self._model
        weights = model.weights
        # Every row may name all pages; padding names the scratch page once a row.
        pages = self._scratch_page + rows
        attention = DecodeAttention(
            model.spec, model.pools.page_tokens, model.workspace, rows, pages
        )
        nothing = StepInput(
            rows=[], order=[], spans=[],
            tokens=_none(), sources=_none(), positions=_none(),
            sampled_rows=_none(), sampled_tokens=_none(),
        )  # fmt: skip
        tables = BlockTables.of([], model.pools.page_tokens, 0).padded(rows, self._scratch_page)
        arrays = self._arrays(nothing, tables, rows)
        packed = pack(arrays)
        size = len(packed) + padded(4 * (pages - rows))
        inputs = torch.zeros(size, dtype=torch.uint8, device=weights.device)
        inputs[: len(packed)].copy_(packed)
        at = views(inputs, arrays)

        def attend(layer: int, query: Tensor, qkv: Tensor) -> Tensor:
            out = torch.empty_like(query)
            attention.run(query, model.pools["gpu"][:, layer], out)
            return out

        def body() -> Tensor:
            from dualpace.gpu.triton_kernels import draw

            tokens = with_previous(at["tokens"], at["sources"], self._sampled)
            hidden = model.layers(tokens, at["positions"], at["pages"], at["offsets"], attend)
            logits = functional.linear(hidden, weights.lm_head)
            drawn = draw(logits, at["temperatures"], at["seeds"], at["positions"] + 1)
            self._sampled[:rows] = drawn
            return logits

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            attention.plan(tables, at["indices"], weights.dtype)
            body()  # kernels are compiled and libraries set up outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = body()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Graph(graph, attention, inputs, logits)


def _none() -> npt.NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)
