"""Where prompts for the host are computed: GPU pages through which their KV passes.

A host-destined chunk is computed in pages of a small region beside the GPU's pool, exactly like a
chunk with a seat, and its pages are stored to the host when the step has ended. The pages stay for
the prompt's next chunk while there is room, so that a prompt up to the region's size is never read
back. Knows requests by their ids and pages by their numbers; takes part in no decision.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
import torch

from dualpace.core.plan import Batch, BatchRow
from dualpace.gpu.page_copies import PageCopies
from dualpace.kv.pages import pages_for


@dataclass
class _Passage:
    """One request's pages in the region, from position 0 on, and its latest store."""

    pages: list[int] = field(default_factory=list)
    positions: int = 0  # leading positions that the pages hold
    stored: torch.cuda.Event | None = None


class Transit:
    """Pages [first, first + count) of the GPU's pool tensor. Used by the launching thread alone."""

    def __init__(self, copies: PageCopies, first: int, count: int, page_tokens: int) -> None:
        self._copies = copies
        self._page_tokens = page_tokens
        self._free = list(range(first, first + count))
        self._passages: OrderedDict[str, _Passage] = OrderedDict()  # the least recent first
        self._landing: dict[str, torch.cuda.Event] = {}  # latest stores, not asked for yet
        self._leaving: list[tuple[torch.cuda.Event, list[int]]] = []  # free after the event

    def place(self, batch: Batch) -> Batch:
        """The batch with its rows for the host, as far as they find room, in pages of the region.

        A row that finds none, or whose earlier chunks have left the region, stays as it is.
        """
        rows = []
        kept: set[str] = set()
        for row in batch.rows:
            pages = self._enter(row, kept) if row.tier == "host" else None
            if pages is not None:
                kept.add(row.request_id)
                row = msgspec.structs.replace(row, tier="gpu", pages=pages)
            rows.append(row)
        return Batch(batch.number, tuple(rows))

    def depart(self, asked: Batch, placed: Batch) -> None:
        """The step has been launched: store what it computes once it has ended."""
        moved = [
            (row, passing.pages)
            for row, passing in zip(asked.rows, placed.rows, strict=True)
            if row.tier != passing.tier
        ]
        if not moved:
            return
        ended = torch.cuda.Event()
        ended.record()
        for row, pages in moved:
            first, last = row.start // self._page_tokens, pages_for(row.end, self._page_tokens)
            stored = self._copies.store(pages[first:last], row.pages[first:last], ended)
            passage = self._passages[row.request_id]
            passage.stored = self._landing[row.request_id] = stored
            if row.sample:
                self._leave(row.request_id)

    def landing(self, request_id: str) -> torch.cuda.Event | None:
        """The event after which all that was launched so far for the request is on the host."""
        return self._landing.pop(request_id, None)

    def _enter(self, row: BatchRow, kept: set[str]) -> list[int] | None:
        passage = self._passages.get(row.request_id)
        if row.start == 0 and passage is not None:
            self._leave(row.request_id)  # it starts again
            passage = None
        if passage is None:
            if row.start > 0:
                return None
            passage = _Passage()
        elif passage.positions < row.start:
            return None
        needed = pages_for(row.end, self._page_tokens)
        if not self._make_room(needed - len(passage.pages), kept | {row.request_id}):
            return None
        while len(passage.pages) < needed:
            passage.pages.append(self._free.pop(0))
        passage.positions = row.end
        self._passages[row.request_id] = passage
        self._passages.move_to_end(row.request_id)
        return list(passage.pages)

    def _make_room(self, count: int, kept: set[str]) -> bool:
        """Free at least `count` pages, at the cost of other prompts' passages if need be."""
        while len(self._free) < count:
            if not self._leaving:
                victim = next((name for name in self._passages if name not in kept), None)
                if victim is None:
                    return False
                self._leave(victim)
                continue
            # The step about to be launched overwrites the pages: not before they are stored.
            stored, pages = self._leaving.pop(0)
            torch.cuda.current_stream().wait_event(stored)
            self._free += pages
        return True

    def _leave(self, request_id: str) -> None:
        passage = self._passages.pop(request_id)
        if passage.stored is None:
            self._free += passage.pages
        else:
            self._leaving.append((passage.stored, passage.pages))
