"""Paged attention on FlashInfer for rows whose KV lies in the GPU's pool.

Decodes go through its tensor-core decode kernel, chunks of prompts through its prefill kernel.
Knows block tables and positions; KV has been written into the pages before `run` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        used = [-(-(span.end - span.base) // page_tokens) for span in spans]
        indices = np.fromiter(
            (page for span, count in zip(spans, used, strict=True) for page in span.pages[:count]),
            dtype=np.int32,
            count=sum(used),
        )
        if indices.size and (indices.min() < 0 or indices.max() >= pool_pages):
            raise EngineError(f"a page outside the gpu pool of {pool_pages} pages")
        indptr = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(used, out=indptr[1:])
        ends = np.array([span.end - span.base for span in spans], dtype=np.int32)
        counts = np.array([span.count for span in spans], dtype=np.int32)
        rows = np.repeat(np.arange(len(spans)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = (ends - counts)[rows] + within
        return cls(
            indptr=indptr,
            indices=indices,
            last_page_len=(ends - 1) % page_tokens + 1,
            pages=indices[indptr[rows] + positions // page_tokens],
            offsets=(positions % page_tokens).astype(np.int32),
        )

    def padded(self, rows: int, page: int) -> BlockTables:
        """With decodes of one token in `page` added until there are `rows`."""
        more = rows - len(self.last_page_len)
        end = self.indptr[-1]
        return BlockTables(
            indptr=np.append(self.indptr, np.arange(end + 1, end + 1 + more)).astype(np.int32),
            indices=np.append(self.indices, np.full(more, page, np.int32)),
            last_page_len=np.append(self.last_page_len, np.ones(more, np.int32)),
            pages=np.append(self.pages, np.full(more, page, np.int32)),
            offsets=np.append(self.offsets, np.zeros(more, np.int32)),
        )


class DecodeAttention:
    """One query token a row. With `rows`, for that many rows inside a CUDA graph."""

    def __init__(
        self, spec: ModelSpec, page_tokens: int, workspace: Tensor, rows: int = 0, pages: int = 0
    ) -> None:
        """workspace: uint8, may be shared by what never runs at once; pages: most that the tables
        of a graph's rows name."""
        wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper
        buffers = {}
        if rows:
            device = workspace.device
            buffers = {
                "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32, device=device),
                "paged_kv_indices_buffer": torch.zeros(pages, dtype=torch.int32, device=device),
                "paged_kv_last_page_len_buffer": torch.ones(rows, dtype=torch.int32, device=device),
            }
        self._wrapper = _without_pinned_memory(
            wrapper(workspace, "HND", use_cuda_graph=rows > 0, use_tensor_cores=True, **buffers)
        )
        self._spec = spec
        self._page_tokens = page_tokens

    def plan(self, tables: BlockTables, indices: Tensor) -> None:
        """indices: `tables.indices` on the device."""
        self._wrapper.plan(
            torch.from_numpy(tables.indptr), indices, torch.from_numpy(tables.last_page_len),
            self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim, self._page_tokens,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip

    def run(self, query: Tensor, pool: Tensor, out: Tensor) -> None:
        """query, out: [rows, heads, D]; pool: [pages, 2, kv_heads, page_tokens, D]."""
        self._wrapper.run(query, pool, out=out)


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
            causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip

    def run(self, query: Tensor, pool: Tensor, out: Tensor) -> None:
        """query, out: [tokens, heads, D]; pool: [pages, 2, kv_heads, page_tokens, D]."""
        self._wrapper.run(query, pool, out=out)

    def run_with_lse(self, query: Tensor, pool: Tensor, out: Tensor) -> Tensor:
        """The same; returns log2 of the sums that softmax divides by, float32 [tokens, heads]."""
        lse: Tensor = self._wrapper.run(query, pool, out=out, return_lse=True)[1]
        return lse


class ContextAttention:
    """One row's queries, all of which see all of some whole pages."""

    def __init__(self, spec: ModelSpec, page_tokens: int, workspace: Tensor) -> None:
        wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper
        self._wrapper = _without_pinned_memory(wrapper(workspace, "HND"))
        self._spec = spec
        self._page_tokens = page_tokens

    def plan(self, queries: int, pages: Int32Array) -> None:
        """pages: their ids in the pool that `run` is given."""
        self._wrapper.plan(
            torch.from_numpy(np.array([0, queries], dtype=np.int32)),
            torch.from_numpy(np.array([0, len(pages)], dtype=np.int32)),
            torch.from_numpy(pages).to("cuda", non_blocking=True),
            torch.from_numpy(np.array([self._page_tokens], dtype=np.int32)),
            self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim, self._page_tokens,
            causal=False, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip

    def run(self, query: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Output [queries, heads, D] and log2 sums [queries, heads], as of `run_with_lse`."""
        out, lse = self._wrapper.run(query, pool, return_lse=True)
        return out, lse


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
