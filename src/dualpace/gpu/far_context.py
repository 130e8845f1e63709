"""Attention to what a long prompt has on the host already, a layer at a time.

A chunk of a prompt for the host sees its latest pages on the GPU (`transit`); what lies before them
comes back from the host's pages in tiles of bounded size, a few of them ahead of the layer that
needs them, and its part of the attention is merged with the rest by log-sum-exp. So a prompt may be
longer than all the memory of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.flashinfer_attention import ContextAttention, LayerRuns, flashinfer
from dualpace.gpu.page_copies import PageCopies, Run
from dualpace.gpu.step_input import Span

TILE_TOKENS = 8192
SLOTS = 3  # tiles under way or in use


@dataclass(frozen=True)
class _Unit:
    """One row's look at one tile."""

    first: int  # token of the step
    count: int
    pages: int  # of the host
    runs: list[Run]  # in which they come


class _Merge(NamedTuple):
    """What one unit's attention makes in each layer, and what that is merged into."""

    attend: LayerRuns
    seen: Tensor  # [count, heads, D]
    weight: Tensor  # float32 [count, heads]
    out: Tensor  # like `seen`
    lse: Tensor  # like `weight`


class FarContext:
    """`plan` for a step, `begin`, then a call for each layer in order."""

    def __init__(
        self, spec: ModelSpec, page_tokens: int, workspace: Tensor, copies: PageCopies
    ) -> None:
        self._spec = spec
        self._page_tokens = page_tokens
        self._workspace = workspace
        self._copies = copies
        self._tile_pages = TILE_TOKENS // page_tokens
        self._attentions: list[ContextAttention] = []
        self._planned: dict[tuple[int, int], ContextAttention] = {}  # by queries and pages
        self._tiles: Tensor | None = None
        self._units: list[_Unit] = []
        self._started = 0
        # By slot, of the latest tile there, which may be one of the step before.
        self._loaded = [torch.cuda.Event() for _ in range(SLOTS)]
        self._used = [torch.cuda.Event() for _ in range(SLOTS)]

    def plan(self, spans: Sequence[Span], host_pages: Sequence[Sequence[int]]) -> None:
        """host_pages: for each span, the pages of what is before its first page on the GPU. What is
        loaded from here on finds it there."""
        self._units = [
            _Unit(span.first, span.count, len(tile), self._copies.gather_runs(tile))
            for span, pages in zip(spans, host_pages, strict=True)
            for begin in range(0, len(pages), self._tile_pages)
            for tile in (pages[begin : begin + self._tile_pages],)
        ]
        if not self._units:
            return
        if self._tiles is None:  # few ever need them
            shape = (
                SLOTS, self._tile_pages, 2, self._spec.num_kv_heads, self._page_tokens,
                self._spec.head_dim,
            )  # fmt: skip
            self._tiles = torch.empty(shape, dtype=torch.bfloat16, device=self._workspace.device)
            for used in self._used:  # by whatever had this memory before
                used.record()
        # Most tiles are full: what is planned for one of a row is right for all of its like.
        shapes = dict.fromkeys((unit.count, unit.pages) for unit in self._units)
        while len(self._attentions) < len(shapes):
            self._attentions.append(
                ContextAttention(self._spec, self._page_tokens, self._workspace)
            )
        self._planned = dict(zip(shapes, self._attentions, strict=False))
        for (count, pages), attention in self._planned.items():
            attention.plan(count, np.arange(pages, dtype=np.int32))
        self._started = 0
        for _ in range(SLOTS):
            self._start_next()

    def begin(self, query: Tensor, out: Tensor, lse: Tensor) -> Callable[[int], None]:
        """What merges a layer's far context into `out` [N, heads, D] and `lse`, float32 [N, heads],
        which hold the attention to the pages on the GPU. query: [N, heads, D]."""
        most = max(unit.count for unit in self._units)
        seen, weight = torch.empty_like(out[:most]), torch.empty_like(lse[:most])
        merges = []
        for unit in self._units:
            part, count = slice(unit.first, unit.first + unit.count), unit.count
            attention = self._planned[count, unit.pages]
            attend = attention.begin(query[part], seen[:count], weight[:count])
            merges.append(_Merge(attend, seen[:count], weight[:count], out[part], lse[part]))
        return partial(self._merge, merges)

    def _merge(self, merges: Sequence[_Merge], layer: int) -> None:
        assert self._tiles is not None
        merge_in_place = flashinfer().merge_state_in_place
        stream = torch.cuda.current_stream()
        for place, (unit, merge) in enumerate(zip(self._units, merges, strict=True)):
            slot = (layer * len(self._units) + place) % SLOTS
            tile = self._tiles[slot, : unit.pages]
            stream.wait_event(self._loaded[slot])
            merge.attend((tile[:, 0], tile[:, 1]))
            merge_in_place(merge.out, merge.lse, merge.seen, merge.weight)
            self._used[slot].record(stream)
            self._start_next()

    def _start_next(self) -> None:
        """Start loading the next tile, if there is one, once its slot is free."""
        number = self._started
        layer, place = divmod(number, len(self._units))
        if layer == self._spec.num_layers:
            return
        assert self._tiles is not None
        slot = number % SLOTS
        unit = self._units[place]
        self._copies.load_layer(
            layer, unit.runs, self._tiles[slot], self._used[slot], self._loaded[slot]
        )
        self._started += 1
