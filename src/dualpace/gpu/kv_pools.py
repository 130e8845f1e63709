"""The two KV pools as tensors: the GPU's own pages and the shared host arena.

Both are `[page][layer][2 (K, V)][kv_head][page_tokens][head_dim]`, so that a page of one is the
same bytes as a page of the other and a move is a plain copy. Which page belongs to whom is the
schedulers' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualpace.core.errors import EngineError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Tier


class KVPools:
    """Page pools by tier; a tier without pages is a pool of length 0."""

    def __init__(self, gpu: Tensor, host: Tensor) -> None:
        self._by_tier: dict[Tier, Tensor] = {"gpu": gpu, "host": host}

    def __getitem__(self, tier: Tier) -> Tensor:
        """[pages, layers, 2, kv_heads, page_tokens, head_dim]"""
        return self._by_tier[tier]

    @property
    def page_tokens(self) -> int:
        return int(self._by_tier["gpu"].shape[4])

    def copy(self, source: Tier, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """Copy whole pages from the pool `source` to the other one, where both lie on the CPU."""
        target: Tier = "host" if source == "gpu" else "gpu"
        if len(source_pages) != len(target_pages):
            raise EngineError(f"{len(source_pages)} pages cannot fill {len(target_pages)}")
        reads = self.page_index(source, source_pages)
        writes = self.page_index(target, target_pages)
        self._by_tier[target][writes] = self._by_tier[source][reads]

    def page_index(self, tier: Tier, pages: Sequence[int]) -> Tensor:
        """`pages` as int64 [n] on the CPU. Raises `EngineError` for a page outside the pool.

        Checked here because a CUDA kernel that indexes outside its tensor ends the process.
        """
        index = np.asarray(pages, dtype=np.int64)
        size = len(self._by_tier[tier])
        if index.size and (index.min() < 0 or index.max() >= size):
            raise EngineError(f"page outside the {tier} pool of {size} pages: {list(pages)}")
        return torch.from_numpy(index)


def new_pool(
    spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised pool of `pages` pages."""
    return torch.empty(pool_shape(spec, pages, page_tokens), dtype=dtype, device=device)


def arena_pool(
    arena: Any, spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype
) -> Tensor:
    """The first `pages` pages of a writable buffer, shared and not copied.

    Raises `EngineError` where the buffer is too small. The tensor keeps the buffer exported: an
    mmap cannot be closed before it is gone.
    """
    shape = pool_shape(spec, pages, page_tokens)
    count = int(np.prod(shape))
    needed, available = count * dtype.itemsize, memoryview(arena).nbytes
    if needed > available:
        raise EngineError(f"{pages} host pages need {needed} bytes, the arena has {available}")
    return torch.frombuffer(arena, dtype=dtype, count=count).view(shape)


def pool_shape(spec: ModelSpec, pages: int, page_tokens: int) -> tuple[int, ...]:
    return (pages, spec.num_layers, 2, spec.num_kv_heads, page_tokens, spec.head_dim)
