"""Where prompts for the host are computed: GPU pages through which their KV passes.

A host-destined chunk is computed in pages of a small region beside the GPU's pool, exactly like a
chunk with a seat, and its pages are stored to the host when the step has ended. The latest pages
stay for the prompt's next chunk while there is room; what has left is `far_context`'s. Knows
requests by their ids and pages by their numbers; takes part in no decision.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from dualpace.core.plan import Batch, BatchRow
from dualpace.gpu.page_copies import PageCopies
from dualpace.kv.pages import pages_for


@dataclass
class _Passage:
    """One request's pages in the region, and the stores of what was computed in them."""

    base: int  # position at which the pages begin
    pages: list[int] = field(default_factory=list)
    positions: int = 0  # that it has computed: up to here the pages hold KV
    # Up to which position each has brought it to the host, oldest first.
    stores: list[tuple[int, torch.cuda.Event]] = field(default_factory=list)

    @property
    def stored(self) -> torch.cuda.Event | None:
        """The latest store."""
        return self.stores[-1][1] if self.stores else None

    def shed(self, pages: int, page_tokens: int) -> tuple[torch.cuda.Event, list[int]]:
        """Let go of the oldest pages, whose chunks have ended: these, and their own last store."""
        shed, self.pages = self.pages[:pages], self.pages[pages:]
        self.base += pages * page_tokens
        while len(self.stores) > 1 and self.stores[0][0] < self.base:
            self.stores.pop(0)
        return self.stores[0][1], shed


class Placement(NamedTuple):
    """A batch with rows for the host in pages of the region, as if they had seats.

    far: of the requests whose pages there do not begin at position 0, the host's that come before.
    """

    batch: Batch
    far: dict[str, list[int]]


class Transit:
    """Pages [first, first + count) of the GPU's pool tensor. Used by the launching thread alone."""

    def __init__(self, copies: PageCopies, first: int, count: int, page_tokens: int) -> None:
        self._copies = copies
        self._page_tokens = page_tokens
        self._free = list(range(first, first + count))
        self._passages: OrderedDict[str, _Passage] = OrderedDict()  # the least recent first
        self._landing: dict[str, torch.cuda.Event] = {}  # latest stores, not asked for yet
        self._leaving: list[tuple[torch.cuda.Event, list[int]]] = []  # free after the event

    def place(self, batch: Batch) -> Placement:
        """A row that finds no room stays as it is."""
        entering: dict[str, _Passage] = {}
        missing: dict[str, int] = {}  # pages that a row needs beside those that it has
        for row in batch.rows:
            if row.tier == "host" and not row.gated:
                passage = self._passage(row)
                if passage is not None:
                    needed = pages_for(row.end - passage.base, self._page_tokens)
                    entering[row.request_id] = passage
                    missing[row.request_id] = max(0, needed - len(passage.pages))
        self._make_room(sum(missing.values()), batch, entering)
        rows = []
        far = {}
        for row in batch.rows:
            passage = entering.get(row.request_id)
            if passage is not None and missing[row.request_id] <= len(self._free):
                passage.pages += [self._free.pop(0) for _ in range(missing[row.request_id])]
                passage.positions = row.end
                self._passages[row.request_id] = passage
                self._passages.move_to_end(row.request_id)
                if passage.base:
                    far[row.request_id] = row.pages[: passage.base // self._page_tokens]
                row = msgspec.structs.replace(row, tier="gpu", pages=list(passage.pages))
            rows.append(row)
        return Placement(msgspec.structs.replace(batch, rows=tuple(rows)), far)

    def depart(self, asked: Batch, placement: Placement) -> None:
        """The step has been launched: store what it computes once it has ended."""
        moved = [
            (row, passing.pages)
            for row, passing in zip(asked.rows, placement.batch.rows, strict=True)
            if row.tier != passing.tier
        ]
        if not moved:
            return
        ended = self._copies.mark()
        for row, pages in moved:
            first, last = row.start // self._page_tokens, pages_for(row.end, self._page_tokens)
            skipped = len(placement.far.get(row.request_id, ()))
            stored = self._copies.store(
                pages[first - skipped : last - skipped], row.pages[first:last], ended
            )
            self._passages[row.request_id].stores.append((row.end, stored))
            self._landing[row.request_id] = stored
            if row.sample:
                self._leave(row.request_id)

    def landing(self, request_id: str) -> torch.cuda.Event | None:
        """The event after which all that was launched so far for the request is on the host."""
        return self._landing.pop(request_id, None)

    def _passage(self, row: BatchRow) -> _Passage | None:
        """The row's, or a new one; None if the page that the row goes on with is elsewhere."""
        passage = self._passages.get(row.request_id)
        if passage is not None and (row.start == 0 or passage.positions < row.start):
            self._leave(row.request_id)  # it starts again, or has been elsewhere meanwhile
            passage = None
        if passage is None:
            if row.start % self._page_tokens:
                return None
            passage = _Passage(base=row.start)
            if row.start:
                self._copies.loads_follow_stores()
        return passage

    def _make_room(self, count: int, batch: Batch, entering: dict[str, _Passage]) -> None:
        """Free so many pages, as far as possible: at the cost of other prompts' passages, then of
        the oldest pages of the batch's own prompts, which are on the host by now."""
        others = [name for name in self._passages if name not in entering]
        while self._soon_free < count and others:
            self._leave(others.pop(0))
        own = [
            (row.start, entering[row.request_id])
            for row in batch.rows
            if row.request_id in entering and entering[row.request_id].stores
        ]
        for start, passage in sorted(own, key=lambda each: -len(each[1].pages)):
            before = (start - passage.base) // self._page_tokens
            shed = min(before, count - self._soon_free)
            if shed > 0:
                stored, pages = passage.shed(shed, self._page_tokens)
                self._copies.loads_follow(stored)
                self._leaving.append((stored, pages))
        while len(self._free) < count and self._leaving:
            # The step about to be launched overwrites the pages: not before they are stored.
            stored, pages = self._leaving.pop(0)
            self._copies.steps_follow(stored)
            self._free += pages

    @property
    def _soon_free(self) -> int:
        return len(self._free) + sum(len(pages) for _, pages in self._leaving)

    def _leave(self, request_id: str) -> None:
        passage = self._passages.pop(request_id)
        if passage.stored is None:
            self._free += passage.pages
        else:
            self._leaving.append((passage.stored, passage.pages))
