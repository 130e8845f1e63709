"""Page pools: a page is free when the last holder of its table lets go, and never twice."""

from __future__ import annotations

import random

import pytest

from dualpace.kv.pages import BlockTable, PagePool, pages_for


def test_pages_are_free_only_when_the_last_holder_lets_go() -> None:
    pool = PagePool(4)
    table = pool.take(3)
    assert table is not None
    pool.hold(table)
    pool.drop(table)
    assert pool.free == 1
    assert pool.take(2) is None
    pool.drop(table)
    assert pool.free == 4
    for late in (pool.drop, pool.hold):
        with pytest.raises(AssertionError, match="free already"):
            late(table)


def test_a_refused_allocation_changes_nothing() -> None:
    pool = PagePool(4)
    table = pool.take(2)
    assert table is not None
    assert not pool.grow(table, 3)
    assert (table.pages, pool.free) == ([0, 1], 2)


def test_tables_are_made_of_runs_where_there_are_runs() -> None:
    pool = PagePool(10)
    first, second = pool.take(3), pool.take(3)
    assert first is not None
    assert second is not None
    assert pool.grow(second)
    assert second.pages == [3, 4, 5, 6]
    pool.drop(first)
    scattered = pool.take(6)
    assert scattered is not None
    assert scattered.pages == [0, 1, 2, 7, 8, 9]


@pytest.mark.parametrize("total", [0, 1, 8])
def test_random_use_never_gives_a_page_to_two_tables(total: int) -> None:
    rng = random.Random(total)
    pool = PagePool(total)
    held: list[BlockTable] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            table = rng.choice(held)
            if rng.random() < 0.5:
                pool.drop(table)
                held.remove(table)
            elif rng.random() < 0.5:
                pool.hold(table)
                held.append(table)
            else:
                pool.grow(table, rng.randint(0, 2))
        elif (table := pool.take(rng.randint(0, 3))) is not None:
            held.append(table)
        pool.check_integrity()
    for table in held:
        pool.drop(table)
    pool.check_integrity(idle=True)


def test_pages_for_rounds_up() -> None:
    assert [pages_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
