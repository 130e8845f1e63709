"""Paged attention in plain torch, for any device: gather the context, then SDPA.

Rows of one tier with as many query tokens and about as long a context are computed together. A
row of the host tier works from the host pool through blocking copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.plan import Tier
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.step_input import Span

# Rows are attended together up to this many gathered positions, which bounds the workspace.
GATHER_TOKENS = 16384


@dataclass(frozen=True)
class _Writes:
    """Where a tier's new tokens go; index tensors live on the pool's device."""

    tier: Tier
    tokens: Tensor  # int64 [n], on the model's device
    pages: Tensor  # int64 [n]
    offsets: Tensor  # int64 [n], within the page


@dataclass(frozen=True)
class _Group:
    """Rows attended together: R rows of Q query tokens over T gathered positions."""

    tier: Tier
    tokens: Tensor  # int64 [R, Q], on the model's device
    block_table: Tensor  # int64 [R, T / page_tokens], on the pool's device
    visible: Tensor  # bool [R, 1, group_size * Q, T]
    gaps: tuple[Tensor, Tensor]  # int64 row and position of all that is no KV of the row's request


class TorchAttention:
    """`Attention` on torch operations alone."""

    def __init__(self, pools: KVPools, group_size: int, device: torch.device) -> None:
        """group_size: query heads per KV head; device: the model's."""
        self._pools = pools
        self._group_size = group_size
        self._device = device
        self._writes: list[_Writes] = []
        self._groups: list[_Group] = []

    def plan(self, spans: Sequence[Span]) -> None:
        by_tier: dict[Tier, list[Span]] = defaultdict(list)
        by_shape: dict[tuple[Tier, int, int], list[Span]] = defaultdict(list)
        for span in spans:
            by_tier[span.tier].append(span)
            # Power-of-two classes of context length bound the padding at a factor of two.
            pages = -(-span.end // self._pools.page_tokens)
            by_shape[span.tier, span.count, (pages - 1).bit_length()].append(span)
        self._writes = [self._plan_writes(tier, rows) for tier, rows in by_tier.items()]
        self._groups = []
        for (tier, count, size_class), rows in by_shape.items():
            together = max(1, GATHER_TOKENS // (self._pools.page_tokens << size_class))
            for begin in range(0, len(rows), together):
                self._groups.append(self._plan_group(tier, count, rows[begin : begin + together]))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for writes in self._writes:
            pool = self._pools[writes.tier][:, layer]
            for part, new in enumerate((k, v)):
                pool[:, part][writes.pages, :, writes.offsets] = new[writes.tokens].to(pool.device)
        out = torch.empty_like(q)
        for group in self._groups:
            out[group.tokens] = self._attend(layer, q[group.tokens], group)
        return out

    def _attend(self, layer: int, q: Tensor, group: _Group) -> Tensor:
        """q [R, Q, heads, D] to [R, Q, heads, D]"""
        rows, queries, heads, head_dim = q.shape
        kv_heads = heads // self._group_size
        pool = self._pools[group.tier][:, layer]
        # index_select moves a layer's part of a page as one block; plain indexing goes by element.
        context = pool.flatten(1).index_select(0, group.block_table.flatten()).to(q.device)
        context = context.view(rows, -1, *pool.shape[1:]).permute(2, 0, 3, 1, 4, 5)
        # [2, R, kv_heads, pages, page_tokens, D] to two of [R, kv_heads, T, D]
        context = context.reshape(2, rows, kv_heads, -1, head_dim)
        # A page's unwritten end may hold anything, and a NaN there passes through a masked softmax.
        gap_rows, gap_positions = group.gaps
        context[:, gap_rows, :, gap_positions] = 0.0
        k, v = context
        # The query heads of one KV head become more queries: no copy of K and V per head.
        q = q.reshape(rows, queries, kv_heads, self._group_size, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=group.visible)
        out = out.view(rows, kv_heads, self._group_size, queries, head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, head_dim)

    def _plan_writes(self, tier: Tier, spans: Sequence[Span]) -> _Writes:
        page_tokens = self._pools.page_tokens
        pages, offsets, tokens = [], [], []
        for span in spans:
            positions = torch.arange(span.start, span.end)
            table = self._pools.page_index(tier, span.pages)
            pages.append(table[positions // page_tokens])
            offsets.append(positions % page_tokens)
            tokens.append(torch.arange(span.first, span.first + span.count))
        device = self._pools[tier].device
        return _Writes(
            tier=tier,
            tokens=torch.cat(tokens).to(self._device),
            pages=torch.cat(pages).to(device),
            offsets=torch.cat(offsets).to(device),
        )

    def _plan_group(self, tier: Tier, queries: int, spans: Sequence[Span]) -> _Group:
        page_tokens = self._pools.page_tokens
        num_pages = [-(-span.end // page_tokens) for span in spans]
        width = max(num_pages)
        block_table = torch.empty((len(spans), width), dtype=torch.int64)
        for row, (span, used) in enumerate(zip(spans, num_pages, strict=True)):
            block_table[row, :used] = self._pools.page_index(tier, span.pages[:used])
            block_table[row, used:] = span.pages[0]  # padding: any page that exists
        first = torch.tensor([span.first for span in spans], device=self._device)
        start = torch.tensor([span.start for span in spans], device=self._device)
        query = torch.arange(queries, device=self._device)
        key = torch.arange(width * page_tokens, device=self._device)
        query_position = start[:, None] + query  # [R, Q]
        visible = key <= query_position[:, :, None]  # [R, Q, T]
        gap_rows, gap_positions = torch.nonzero(key > query_position[:, -1:], as_tuple=True)
        return _Group(
            tier=tier,
            tokens=first[:, None] + query,
            block_table=block_table.to(self._pools[tier].device),
            visible=visible.repeat(1, self._group_size, 1)[:, None],
            gaps=(gap_rows, gap_positions),
        )
