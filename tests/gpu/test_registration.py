"""What the arena's memory is made of before CUDA gets to know it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dualpace.cpu.memory import create_arena, map_arena
from dualpace.gpu.registration import HUGE_PAGE, give_memory

SIZE = 16 * HUGE_PAGE


def mapped(address: int) -> dict[str, int]:
    """What /proc says of the mapping at `address`, in bytes."""
    found: dict[str, int] = {}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            ours = begin <= address < end
        elif ours and values[1:] == ["kB"]:
            found[name.rstrip(":")] = int(values[0]) * 1024
    return found


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (4096 * 3, SIZE - 4096 * 10)])
def test_all_of_it_is_there_and_what_was_in_it_stays(offset: int, size: int) -> None:
    descriptor = create_arena(SIZE)
    arena = map_arena(descriptor, SIZE)
    os.close(descriptor)
    rng = np.random.default_rng(0)
    written = {int(place): int(rng.integers(1, 255)) for place in rng.integers(0, SIZE, 40)}
    for place, value in written.items():
        arena[place] = value
    address = arena.ctypes.data
    give_memory(address + offset, size)
    facts = mapped(address)
    assert facts["Rss"] >= size
    if offset == 0 and facts["ShmemPmdMapped"]:  # not every kernel gives huge pages
        assert facts["ShmemPmdMapped"] == SIZE
    assert {place: int(arena[place]) for place in written} == written
    assert np.count_nonzero(arena) == len(written)
