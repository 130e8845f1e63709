"""Attention to what a long prompt has on the host already, a layer at a time.

A chunk of a prompt for the host sees its latest pages on the GPU (`transit`); what lies before them
comes back from the host's pages in tiles of bounded size, a few of them ahead of the layer that
needs them, and its part of the attention is merged with the rest by log-sum-exp. So a prompt may be
longer than all the memory of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class _Seen(NamedTuple):
    """What one unit makes in every layer, and what that is merged with."""

    run: LayerRuns
    seen: Tensor  # [count, heads, D]
    weight: Tensor  # float32 [count, heads]
    out: Tensor  # like `seen`
    lse: Tensor  # like `weight`


class FarContext:
    """Planned once for a step, begun, and run once for each layer, in order."""

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
        self._seen: list[_Seen] = []  # of each unit
        self._started = 0
        # By slot, of the latest tile there; that it has been used also by the step before.
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
        self._seen = []
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

    def begin(self, query: Tensor, out: Tensor, lse: Tensor) -> None:
        """The step's queries, [N, heads, D], and what every layer's far context is merged into: the
        attention to the pages on the GPU, likewise, and float32 [N, heads]."""
        most = max(unit.count for unit in self._units)
        seen, weight = torch.empty_like(out[:most]), torch.empty_like(lse[:most])
        for unit in self._units:
            part, count = slice(unit.first, unit.first + unit.count), unit.count
            attention = self._planned[count, unit.pages]
            run = attention.layers(query[part], seen[:count], weight[:count])
            self._seen.append(_Seen(run, seen[:count], weight[:count], out[part], lse[part]))

    def run(self, layer: int) -> None:
        """Merge the layer's far context."""
        assert self._tiles is not None
        merge = flashinfer().merge_state_in_place
        stream = torch.cuda.current_stream()
        for place, (unit, seen) in enumerate(zip(self._units, self._seen, strict=True)):
            slot = (layer * len(self._units) + place) % SLOTS
            tile = self._tiles[slot, : unit.pages]
            stream.wait_event(self._loaded[slot])
            seen.run((tile[:, 0], tile[:, 1]))
            merge(seen.out, seen.lse, seen.seen, seen.weight)
            self._used[slot].record(stream)
            self._start_next()
        if layer + 1 == self._spec.num_layers:
            self._seen = []  # which holds on to what it was begun with

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
