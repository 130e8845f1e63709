"""Paged attention on FlashInfer for rows whose KV lies in the GPU's pool.

Decodes go through its tensor-core decode kernel, chunks of prompts through its prefill kernel.
Knows block tables and positions; KV has been written into a layer's pages before the layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualpace.core.errors import EngineError, HardwareError
from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.step_input import Span

WORKSPACE_BYTES = 256 * 2**20  # partial results of split contexts, for both kernels

Int32Array = npt.NDArray[np.int32]
KvCache = tuple[Tensor, Tensor]  # K and V of one layer: [pages, kv_heads, page_tokens, D]

_DTYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def layer_caches(pool: Tensor) -> list[KvCache]:
    """The caches of all layers of a pool, [pages, layers, 2, kv_heads, page_tokens, D]."""
    return [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(pool.shape[1])]


@dataclass(frozen=True)
class BlockTables:
    """Block tables of rows laid end to end, as FlashInfer wants them; int32."""

    indptr: Int32Array  # [rows + 1]
    indices: Int32Array  # [pages]
    last_page_len: Int32Array  # [rows]
    pages: Int32Array  # [tokens], page that each of the rows' tokens is written to
    offsets: Int32Array  # [tokens], place in that page

    @classmethod
    def of(cls, spans: Sequence[Span], page_tokens: int, pool_pages: int) -> BlockTables:
        """Raises `EngineError` for a page outside the pool, which would end the process."""
        used = [-(-(span.start + span.count - span.base) // page_tokens) for span in spans]
        tables = (span.pages[:count] for span, count in zip(spans, used, strict=True))
        indices = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=sum(used))
        if indices.size and (indices.min() < 0 or indices.max() >= pool_pages):
            raise EngineError(f"a page outside the gpu pool of {pool_pages} pages")
        indptr = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(used, out=indptr[1:])
        starts = np.array([span.start - span.base for span in spans], dtype=np.int32)
        counts = np.array([span.count for span in spans], dtype=np.int32)
        ends = starts + counts
        rows = np.repeat(np.arange(len(spans)), counts)
        positions = np.arange(len(rows)) + (ends - np.cumsum(counts))[rows]
        return cls(
            indptr=indptr,
            indices=indices,
            last_page_len=(ends - 1) % page_tokens + 1,
            pages=indices[indptr[rows] + positions // page_tokens],
            offsets=(positions % page_tokens).astype(np.int32),
        )


@dataclass(frozen=True)
class GraphTables:
    """Where a graph finds the block tables of its rows: int32 on the device, to be filled before
    every replay."""

    indptr: Tensor  # [rows + 1]
    indices: Tensor  # [pages], as many as the rows may name between them
    last_page_len: Tensor  # [rows]


class DecodeAttention:
    """One query token a row. With `graph`, inside a CUDA graph for its number of rows.

    As all attentions here: `plan` for a step, `begin`, then a call for each layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        page_tokens: int,
        workspace: Tensor,
        graph: GraphTables | None = None,
    ) -> None:
        """workspace: uint8, may be shared by what never runs at once."""
        wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper
        buffers = {}
        if graph is not None:
            buffers = {
                "paged_kv_indptr_buffer": graph.indptr,
                "paged_kv_indices_buffer": graph.indices,
                "paged_kv_last_page_len_buffer": graph.last_page_len,
            }
        self._wrapper = _without_pinned_memory(
            wrapper(
                workspace, "HND", use_cuda_graph=bool(buffers), use_tensor_cores=True, **buffers
            )
        )
        self._spec = spec
        self._page_tokens = page_tokens

    def plan(self, tables: BlockTables, indices: Tensor) -> None:
        """indices: `tables.indices` on the device."""
        self._wrapper.plan(*self._arguments(tables, indices), **_DTYPES)

    def plan_again(self, tables: BlockTables) -> None:
        """For a graph that was planned once, and whose `GraphTables` are filled already."""
        arguments = self._arguments(tables, torch.from_numpy(tables.indices))
        flashinfer().fast_decode_plan(self._wrapper, *arguments, **_DTYPES)

    def begin(self, query: Tensor, out: Tensor) -> LayerRuns:
        """As planned, for queries [rows, heads, D]."""
        return LayerRuns(self._wrapper, query, out)

    def _arguments(self, tables: BlockTables, indices: Tensor) -> tuple[Any, ...]:
        return (
            torch.from_numpy(tables.indptr), indices, torch.from_numpy(tables.last_page_len),
            self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim, self._page_tokens,
        )  # fmt: skip


class LayerRuns:
    """Runs a planned wrapper for one layer after the other, on the same queries.

    What the library hands to its kernel differs from layer to layer by K and V alone, and finding
    it out takes the launching thread longer than the launch: from the second layer on, the kernel
    is called with what it was called with for the first.
    """

    def __init__(self, wrapper: Any, query: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """query, out: [tokens, heads, D]; lse: float32 [tokens, heads], gets log2 of the sums that
        softmax divides by."""
        self._wrapper = wrapper
        self._query = query
        self._out = out
        self._lse = lse
        self._kernel: Callable[..., object] | None = None
        self._arguments: list[Any] = []
        self._k = self._v = 0  # their places among the arguments

    def __call__(self, kv: KvCache) -> None:
        if self._kernel is None:
            self._first(kv)
            return
        self._arguments[self._k], self._arguments[self._v] = kv
        self._kernel(*self._arguments)

    def _first(self, kv: KvCache) -> None:
        module = self._wrapper._cached_module
        calls: list[tuple[Any, ...]] = []

        def paged_run(*arguments: Any) -> None:
            calls.append(arguments)
            module.paged_run(*arguments)

        self._wrapper._cached_module = SimpleNamespace(paged_run=paged_run)
        try:
            self._wrapper.run(
                self._query, kv, out=self._out, lse=self._lse, return_lse=self._lse is not None
            )
        finally:
            self._wrapper._cached_module = module
        (arguments,) = calls
        places = [[i for i, each in enumerate(arguments) if each is part] for part in kv]
        if [len(found) for found in places] == [1, 1]:
            (self._k,), (self._v,) = places
            self._arguments = list(arguments)
            self._kernel = module.paged_run


class PrefillAttention:
    """Chunks of prompts, causal, each seeing what is before it in its pages."""

    def __init__(self, spec: ModelSpec, page_tokens: int, workspace: Tensor) -> None:
        wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper
        self._wrapper = _without_pinned_memory(wrapper(workspace, "HND"))
        self._spec = spec
        self._page_tokens = page_tokens

    def plan(self, counts: Sequence[int], tables: BlockTables, indices: Tensor) -> None:
        """counts: query tokens of each row; indices: `tables.indices` on the device."""
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        self._wrapper.plan(
            torch.from_numpy(starts), torch.from_numpy(tables.indptr), indices,
            torch.from_numpy(tables.last_page_len),
            self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim, self._page_tokens,
            causal=True, **_DTYPES,
        )  # fmt: skip

    def begin(self, query: Tensor, out: Tensor, lse: Tensor | None = None) -> LayerRuns:
        """As planned, for queries [tokens, heads, D]."""
        return LayerRuns(self._wrapper, query, out, lse)


class ContextAttention:
    """One row's queries, all of which see all of some whole pages."""

    def __init__(self, spec: ModelSpec, page_tokens: int, workspace: Tensor) -> None:
        wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper
        self._wrapper = _without_pinned_memory(wrapper(workspace, "HND"))
        self._spec = spec
        self._page_tokens = page_tokens

    def plan(self, queries: int, pages: Int32Array) -> None:
        """pages: their ids in the K and V that each layer is given."""
        self._wrapper.plan(
            torch.from_numpy(np.array([0, queries], dtype=np.int32)),
            torch.from_numpy(np.array([0, len(pages)], dtype=np.int32)),
            torch.from_numpy(pages).to("cuda", non_blocking=True),
            torch.from_numpy(np.array([self._page_tokens], dtype=np.int32)),
            self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim, self._page_tokens,
            causal=False, **_DTYPES,
        )  # fmt: skip

    def begin(self, query: Tensor, out: Tensor, lse: Tensor) -> LayerRuns:
        """As planned, for `queries` queries."""
        return LayerRuns(self._wrapper, query, out, lse)


def _without_pinned_memory(wrapper: Any) -> Any:
    """`plan` fills a pinned buffer of the wrapper's own and copies it to the device, where it would
    wait for page moves, and must not be filled again meanwhile; see `upload`."""
    pinned = wrapper._pin_memory_int_workspace_buffer
    wrapper._pin_memory_int_workspace_buffer = torch.empty_like(pinned, pin_memory=False)
    return wrapper


def flashinfer() -> Any:
    """The library. Raises `HardwareError` naming the extra that installs it."""
    try:
        import flashinfer
    except ImportError as error:
        raise HardwareError(
            "a GPU in bfloat16 needs FlashInfer: pip install 'dualpace[cuda]' "
            f"(importing it failed: {error})"
        ) from error
    return flashinfer
