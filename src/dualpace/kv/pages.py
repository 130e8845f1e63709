"""A pool of KV page ids, and who holds which of them.

A page may have several holders at once: the request whose KV it is, a copy that reads or writes
it, and every launched step whose block table names it. It is free when the last one lets go,
whatever else has happened. Ids only: no tensors, no bytes, no knowledge of what a page contains.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

Holder = Hashable


class PagePool:
    """Page ids 0 … total-1 of one tier, owned by one process.

    Allocation prefers consecutive ids, so that a request's pages can move in few large copies.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = bytearray(b"\x01") * total
        self._free_count = total
        self._refs = [0] * total
        self._held: dict[Holder, list[int]] = {}

    @property
    def free(self) -> int:
        """Number of pages nobody holds."""
        return self._free_count

    def held_by(self, holder: Holder) -> list[int]:
        """Pages of `holder` in the order it took them; empty if it holds none."""
        return self._held.get(holder, [])

    def take(self, count: int, holder: Holder) -> list[int] | None:
        """Give `holder` `count` more free pages, or None, and nothing changes, if too few are."""
        if count > self._free_count:
            return None
        pages = self._find(count, self.held_by(holder)[-1:])
        for page in pages:
            self._free[page] = 0
            self._refs[page] = 1
        self._free_count -= count
        if pages:
            self._held.setdefault(holder, []).extend(pages)
        return pages

    def hold(self, pages: Iterable[int], holder: Holder) -> None:
        """Let `holder` hold pages that somebody holds already."""
        held = self._held.setdefault(holder, [])
        for page in pages:
            if self._refs[page] == 0:
                raise AssertionError(f"page {page} is free, {holder!r} cannot join its holders")
            self._refs[page] += 1
            held.append(page)

    def drop(self, holder: Holder) -> int:
        """`holder` lets go of all its pages. Returns how many became free; 0 if it had none."""
        freed = 0
        for page in self._held.pop(holder, ()):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free[page] = 1
                freed += 1
        self._free_count += freed
        return freed

    def rename(self, old: Holder, new: Holder) -> None:
        """Pass all pages of `old` on to `new`, which must hold none."""
        if new in self._held:
            raise AssertionError(f"{new!r} holds pages already")
        if old in self._held:
            self._held[new] = self._held.pop(old)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Recount everything; with `idle`, also demand that every page is free."""
        refs = [0] * self.total
        for pages in self._held.values():
            for page in pages:
                refs[page] += 1
        if refs != self._refs:
            raise AssertionError("page reference counts do not match the holders")
        free = sum(count == 0 for count in refs)
        if free != self._free_count or sum(self._free) != free:
            raise AssertionError(f"{free} pages have no holder, {self._free_count} count as free")
        if idle and free != self.total:
            raise AssertionError(f"{self.total - free} pages leaked, held by {list(self._held)}")

    def _find(self, count: int, last: list[int]) -> list[int]:
        """`count` free ids: right after `last`, else the first run that fits, else any."""
        start = last[0] + 1 if last else -1
        if start < 0 or self._free[start : start + count] != b"\x01" * count:
            start = self._free.find(b"\x01" * count)
        if start >= 0:
            return list(range(start, start + count))
        pages: list[int] = []
        page = -1
        while len(pages) < count:
            page = self._free.find(1, page + 1)
            pages.append(page)
        return pages


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that `tokens` positions fill."""
    return -(-tokens // page_tokens)
