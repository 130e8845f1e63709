"""A pool of KV page ids, and the block tables that hold them.

A block table is the list of a request's pages in one tier, in order of position. It may have
several holders at once: the request whose KV it is, a copy that reads or writes its pages, and
every launched step that names it. Its pages are free when the last holder lets go, whatever else
has happened. Ids only: no tensors, no bytes, no knowledge of what a page contains.
"""

from __future__ import annotations


class BlockTable:
    """Pages of one request, growing at the end. Made by `PagePool.take`."""

    __slots__ = ("holders", "pages")

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.holders = 1

    def __len__(self) -> int:
        return len(self.pages)


class PagePool:
    """Page ids 0 … total-1 of one tier, owned by one process.

    Allocation prefers consecutive ids, so that a request's pages can move in few large copies, and
    low ids, so that memory which was never needed is never touched.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total  # pages that no table holds
        self._is_free = bytearray(b"\x01") * total
        self._tables: set[BlockTable] = set()

    def extend(self, total: int) -> None:
        """Have `total` pages from now on, no fewer than before."""
        more = total - self.total
        if more < 0:
            raise ValueError(f"a pool of {self.total} pages cannot shrink to {total}")
        self._is_free += b"\x01" * more
        self.total = total
        self.free += more

    def take(self, count: int) -> BlockTable | None:
        """A table of `count` pages with the caller as its holder, or None if too few are free."""
        table = BlockTable([])
        if not self.grow(table, count):
            return None
        self._tables.add(table)
        return table

    def grow(self, table: BlockTable, count: int = 1) -> bool:
        """Append `count` free pages; False, and nothing changes, if too few are free."""
        if count > self.free:
            return False
        pages = self._find(count, after=table.pages[-1] if table.pages else None)
        for page in pages:
            self._is_free[page] = 0
        self.free -= count
        table.pages += pages
        return True

    def hold(self, table: BlockTable) -> None:
        """One more holder of a table that has some."""
        if table not in self._tables:
            raise AssertionError(f"the table of pages {table.pages} is free already")
        table.holders += 1

    def drop(self, table: BlockTable) -> None:
        """One holder lets go."""
        if table not in self._tables:
            raise AssertionError(f"the table of pages {table.pages} is free already")
        table.holders -= 1
        if table.holders == 0:
            self._tables.remove(table)
            for page in table.pages:
                self._is_free[page] = 1
            self.free += len(table.pages)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Recount everything; with `idle`, also demand that every page is free."""
        held = [page for table in self._tables for page in table.pages]
        if len(set(held)) != len(held):
            raise AssertionError("a page is in two block tables")
        if any(self._is_free[page] for page in held) or self.total - len(held) != self.free:
            raise AssertionError(f"{len(held)} pages are held, {self.free} count as free")
        if sum(self._is_free) != self.free:
            raise AssertionError(f"{sum(self._is_free)} pages are free, {self.free} count as free")
        if idle and held:
            raise AssertionError(f"{len(held)} pages leaked: {held}")

    def _find(self, count: int, after: int | None) -> list[int]:
        """`count` free ids: right after `after`, else the first run that fits, else the lowest."""
        start = -1 if after is None else after + 1
        if start < 0 or self._is_free[start : start + count] != b"\x01" * count:
            start = self._is_free.find(b"\x01" * count)
        if start >= 0:
            return list(range(start, start + count))
        pages: list[int] = []
        page = -1
        while len(pages) < count:
            page = self._is_free.find(1, page + 1)
            pages.append(page)
        return pages


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that `tokens` positions fill."""
    return -(-tokens // page_tokens)
