"""Prompts for the host in their pages on the GPU: each is stored before its place is used again,
and whoever finds no room stays on the host."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dualpace.core.plan import Batch, BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.transit import Transit

PAGE_TOKENS = 4


class Copies:
    """Knows what pages hold, and brings it to the host as late as it may."""

    def __init__(self) -> None:
        self.on_gpu: dict[int, Any] = {}
        self.on_host: dict[int, Any] = {}
        self.under_way: list[tuple[int, list[int], list[int]]] = []
        self.events = 0
        self.awaited: list[int] = []  # by steps
        self.loadable = 0  # the event that loads come after

    def mark(self) -> int:
        self.events += 1
        return self.events

    def store(self, gpu_pages: list[int], host_pages: list[int], after: int) -> int:
        event = self.mark()
        self.under_way.append((event, list(gpu_pages), list(host_pages)))
        return event

    def loads_follow(self, event: int) -> None:
        self.loadable = max(self.loadable, event)

    def loads_follow_stores(self) -> None:
        self.loadable = self.events

    def loaded(self, host_page: int) -> Any:
        """What a load that begins now is sure to find."""
        for event, gpu_pages, host_pages in reversed(self.under_way):
            if event <= self.loadable and host_page in host_pages:
                return self.on_gpu[gpu_pages[host_pages.index(host_page)]]
        return self.on_host[host_page]

    def steps_follow(self, event: int) -> None:
        self.awaited.append(event)
        while self.under_way and self.under_way[0][0] <= event:
            _, gpu_pages, host_pages = self.under_way.pop(0)
            for gpu_page, host_page in zip(gpu_pages, host_pages, strict=True):
                self.on_host[host_page] = dict(self.on_gpu[gpu_page])


class Prompt:
    def __init__(self, name: str, length: int, pages: list[int]) -> None:
        self.name = name
        self.length = length
        self.pages = pages
        self.done = 0

    def row(self, count: int) -> BatchRow:
        count = min(count, self.length - self.done)
        if self.done + count < self.length:
            count = count // PAGE_TOKENS * PAGE_TOKENS or PAGE_TOKENS
        count = min(count, self.length - self.done)
        end = self.done + count
        return BatchRow(
            self.name,
            [0] * count,
            self.done,
            self.pages,
            "host",
            end == self.length,
            DecodeParams(),
        )


@pytest.mark.parametrize("seed", range(60))
def test_every_position_reaches_its_host_page(seed: int) -> None:
    rng = random.Random(seed)
    copies = Copies()
    size = rng.choice([4, 9, 30])
    transit = Transit(copies, 100, size, PAGE_TOKENS)  # type: ignore[arg-type]
    free = list(range(1000))
    rng.shuffle(free)
    waiting = []
    for i in range(12):
        length = rng.randint(1, 90)
        waiting.append(Prompt(f"p{i}", length, [free.pop() for _ in range(length // 4 + 1)]))
    everyone = list(waiting)
    running: list[Prompt] = []
    while waiting or running:
        while waiting and len(running) < 3:
            running.append(waiting.pop())
        rows = tuple(prompt.row(rng.choice([4, 12, 16])) for prompt in running)
        placement = transit.place(Batch(1, rows))
        if sum(-(-len(row.tokens) // PAGE_TOKENS) for row in rows) <= size:
            assert {placed.tier for placed in placement.batch.rows} == {"gpu"}
        for row, placed in zip(rows, placement.batch.rows, strict=True):
            if placed.tier == "host":  # attended where it lies: what it needs must be there
                copies.steps_follow(copies.events)
                here = copies.on_host
                pages, base = row.pages, 0
            else:
                here = copies.on_gpu
                pages, base = placed.pages, PAGE_TOKENS * len(placement.far.get(row.request_id, ()))
                assert all(100 <= page < 100 + size for page in pages)
                assert base % PAGE_TOKENS == 0
            for position in range(base):
                page, slot = divmod(position, PAGE_TOKENS)
                assert copies.loaded(row.pages[page])[slot] == (row.request_id, position)
            for position in range(base, row.start):
                page, slot = divmod(position - base, PAGE_TOKENS)
                assert here[pages[page]][slot] == (row.request_id, position)
            for position in range(row.start, row.end):
                page, slot = divmod(position - base, PAGE_TOKENS)
                if slot == 0 or pages[page] not in here:
                    here[pages[page]] = {}
                here[pages[page]][slot] = (row.request_id, position)
        used = [p for placed in placement.batch.rows if placed.tier == "gpu" for p in placed.pages]
        assert len(set(used)) == len(used)
        transit.depart(Batch(1, rows), placement)
        for prompt, row in zip(running, rows, strict=True):
            prompt.done = row.end
        running = [prompt for prompt in running if prompt.done < prompt.length]
    copies.steps_follow(copies.events)
    for prompt in everyone:
        for position in range(prompt.length):
            page, slot = divmod(position, PAGE_TOKENS)
            assert copies.on_host[prompt.pages[page]][slot] == (prompt.name, position)


def test_a_long_prompt_waits_for_the_stores_of_its_oldest_chunks_alone() -> None:
    """Not for that of the chunk before, which is under way when the next one is launched."""
    copies, chunk = Copies(), 3 * PAGE_TOKENS
    transit = Transit(copies, 0, 4 * 3, PAGE_TOKENS)  # type: ignore[arg-type]
    prompt = Prompt("p", 10 * chunk, list(range(100, 131)))
    stores = []
    for number in range(9):
        batch = Batch(number, (prompt.row(chunk),))
        placement = transit.place(batch)
        for slot, page in enumerate(placement.batch.rows[0].pages):
            copies.on_gpu[page] = {slot: "whatever"}
        transit.depart(batch, placement)
        stores.append(copies.events)
        prompt.done += chunk
    assert copies.awaited == stores[:5]
    assert copies.loadable == stores[4]


def test_nobody_is_kept_out_by_a_prompt_that_fills_the_region() -> None:
    """It lets go of its oldest pages; attended to where they lie on the host, others would hold up
    the whole step for seconds."""
    copies = Copies()
    transit = Transit(copies, 0, 8, PAGE_TOKENS)  # type: ignore[arg-type]
    long = Prompt("long", 20 * PAGE_TOKENS, list(range(100, 121)))
    for number in range(9):
        others = [
            Prompt(f"short {number}-{i}", 2 * PAGE_TOKENS, [200 + i, 300 + i]) for i in range(2)
        ]
        rows = (long.row(2 * PAGE_TOKENS), *(other.row(2 * PAGE_TOKENS) for other in others))
        placement = transit.place(Batch(number, rows))
        assert {row.tier for row in placement.batch.rows} == {"gpu"}
        for slot, page in enumerate(placement.batch.rows[0].pages):
            copies.on_gpu[page] = {slot: "whatever"}
        for row in placement.batch.rows[1:]:
            copies.on_gpu.update({page: {} for page in row.pages})
        transit.depart(Batch(number, rows), placement)
        long.done += 2 * PAGE_TOKENS
    assert placement.far["long"]
