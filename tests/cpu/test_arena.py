"""The arena's memory: prepared ahead of use and no further, in huge pages, with nothing lost."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from dualpace.cpu import _native
from dualpace.cpu.memory import ArenaPreparer, create_arena, map_arena

MIB = 2**20

# Adds 1 to every word of the arena, page by page, again and again; then tells how often.
WRITER = """
import mmap, sys
import numpy as np
fd, size, rounds = map(int, sys.argv[1:])
words = np.frombuffer(mmap.mmap(fd, size), np.int64)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    for page in range(0, len(words), 512):
        words[page:page + 512] += 1
"""


@pytest.fixture
def native() -> _native.Engine:
    return _native.Engine(sorted(os.sched_getaffinity(0))[:2])


def prepared(size: int, uses: list[int], chunk: int = 100) -> list[tuple[int, int]]:
    """The chunks (offset, length) that are prepared, in order, when so many bytes are used."""
    chunks: list[tuple[int, int]] = []

    def prepare(offset: int, length: int) -> str:
        chunks.append((offset, length))
        return "2 MiB pages"

    preparer = ArenaPreparer(prepare, size, chunk)
    for end in uses:
        preparer.use(end)
    preparer._worker.shutdown(wait=True)
    return chunks


@pytest.mark.parametrize(
    ("uses", "chunks"),
    [
        ([], [(0, 100)]),
        ([1], [(0, 100), (100, 100)]),
        ([100, 40, 100], [(0, 100), (100, 100)]),
        ([101], [(0, 100), (100, 100), (200, 100)]),
        ([330], [(0, 100), (100, 100), (200, 100), (300, 50)]),
        ([10**9, 1], [(0, 100), (100, 100), (200, 100), (300, 50)]),
    ],
)
def test_the_arena_is_prepared_a_chunk_ahead_and_each_part_once(uses, chunks) -> None:
    assert prepared(350, uses) == chunks


def test_what_was_got_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dualpace.cpu.memory")
    preparer = ArenaPreparer(lambda offset, _: "a" if offset < 200 else "b", 400, 100)
    preparer.use(400)
    preparer._worker.shutdown(wait=True)
    assert [record.args[1] for record in caplog.records] == ["a", "b"]


def test_preparing_takes_memory_for_its_range_only_and_keeps_what_is_stored(native) -> None:
    size = 32 * MIB + 4096 * 3
    descriptor = create_arena(size)
    arena = map_arena(descriptor, size)
    want = np.zeros(size, np.uint8)
    want[:: 1001 * 4096] = 7
    arena[:: 1001 * 4096] = 7
    first = os.fstat(descriptor).st_blocks
    got = _native.prepare_arena(native, arena, 4 * MIB, 8 * MIB)
    assert "2 MiB pages" in got or "4 KiB pages (MADV_COLLAPSE: " in got
    assert 0 < (os.fstat(descriptor).st_blocks - first) * 512 <= 8 * MIB
    if got == "2 MiB pages":
        _native.prepare_arena(native, arena, 0, size)
        assert _native.describe_pages(arena) == "2 MiB pages"
    assert (arena == want).all()
    os.close(descriptor)


def test_an_arena_of_a_few_small_pages_is_prepared_too(native) -> None:
    descriptor = create_arena(10_000)
    arena = map_arena(descriptor, 10_000)
    os.close(descriptor)
    assert _native.prepare_arena(native, arena, 0, 10_000).startswith("4 KiB pages")
    with pytest.raises(ValueError, match="outside the buffer"):
        _native.prepare_arena(native, arena, 4096, 8192)


def test_huge_pages_lose_nothing_that_another_process_writes_meanwhile(native) -> None:
    size, rounds = 32 * MIB, 12
    descriptor = create_arena(size)
    arena = map_arena(descriptor, size)
    command = [sys.executable, "-c", WRITER, str(descriptor), str(size), str(rounds)]
    with subprocess.Popen(
        command, pass_fds=(descriptor,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        for offset in range(0, size, 2 * MIB):
            _native.prepare_arena(native, arena, offset, 2 * MIB)
        _, _ = writer.communicate()
    assert writer.returncode == 0
    assert (arena.view(np.int64) == rounds).all()
    os.close(descriptor)


def test_private_memory_tells_what_pages_it_got() -> None:
    memory = _native.map_private(8 * MIB)
    memory[:] = 1
    assert "pages" in _native.describe_pages(memory)
    assert memory.ctypes.data % (2 * MIB) == 0
