"""Host memory: how much this process may use, and the KV arena that all engines share.

The arena is a memfd: it has no name in any file system, so nothing is left behind when the last
process that maps it ends, however it ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dualpace.core.config import format_size
from dualpace.core.errors import ConfigError, HardwareError
from dualpace.cpu import _native
from dualpace.cpu.cgroups import SYSTEM, control_groups, read_text

logger = logging.getLogger(__name__)

UNLIMITED = 2**60  # version 1 groups say so with a very large number
AUTO_SHARE = 0.5  # of the memory left beside the weights, for "auto"
PREPARED_CHUNK = 256 * 2**20  # bytes of the arena that are prepared at a time


def available_memory(system: Path = SYSTEM) -> int:
    """Bytes that can still be used: the least that the machine or a cgroup above us has left."""
    left = [_left(folder) for folder in control_groups("memory", system)]
    return min([_machine_memory(system), *(some for some in left if some is not None)])


def host_pages(
    flag: str, asked: int | None, page_bytes: int, reserved: int, most_pages: int
) -> int:
    """Pages of the host KV arena.

    asked: bytes from the user, None for auto; reserved: bytes that the engines, weights, and KV of
    the stand-in for a GPU will take on the host; most_pages: pages beyond which no request could
    use more.
    Raises `ConfigError` with the numbers if what was asked for does not fit, or is not one page;
    auto shrinks instead.
    """
    left = max(0, available_memory() - reserved)
    if asked is None:
        return min(int(left * AUTO_SHARE) // page_bytes, most_pages)
    if asked > left:
        raise ConfigError(
            f"--{flag} {format_size(asked)} of host memory does not fit: {format_size(left)} is "
            f"left beside {format_size(reserved)} of engines, weights and other KV"
        )
    if 0 < asked < page_bytes:
        raise ConfigError(
            f"--{flag} {format_size(asked)} is less than a page ({format_size(page_bytes)}): write "
            "it like 40GiB, or 0 for none"
        )
    return asked // page_bytes


def create_arena(size: int) -> int:
    """A file descriptor of `size` bytes of shared memory, inherited only where passed on."""
    descriptor = os.memfd_create("dualpace-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def map_arena(descriptor: int, size: int) -> NDArray[np.uint8]:
    """The arena as writable bytes [size], unmapped when the last view of them is gone.

    Mapped at a multiple of 2 MiB, which an `mmap.mmap` is not, and without which a shared mapping
    cannot have huge pages.
    """
    return _native.map_shared(descriptor, size)


class ArenaPreparer:
    """Gives the arena its memory, in huge pages where possible, ahead of its use.

    Page ids are granted from low to high, so what is prepared is a prefix: up to the chunk behind
    the one that is in use. Memory that is never needed is never taken. Work is done on a thread
    of its own, one chunk at a time; nobody waits for it, because memory that is not prepared works
    as well, only slower.

    prepare: called with offset and length of a chunk, says what kind of pages it got.
    """

    def __init__(
        self, prepare: Callable[[int, int], str], size: int, chunk: int = PREPARED_CHUNK
    ) -> None:
        self._prepare = prepare
        self._size = size
        self._chunk = chunk
        self._submitted = 0
        self._got = ""
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dualpace-arena")
        self.use(0)

    def use(self, end: int) -> None:
        """The bytes before `end` are in use, or soon will be. Returns at once."""
        chunks_in_use = -(-end // self._chunk)
        wanted = min(self._size, (chunks_in_use + 1) * self._chunk)
        while self._submitted < wanted:
            length = min(self._chunk, self._size - self._submitted)
            self._worker.submit(self._run, self._submitted, length)
            self._submitted += length

    def wait(self) -> None:
        """Until all that is or soon will be in use is prepared."""
        self._worker.submit(lambda: None).result()

    def close(self) -> None:
        """Finish the chunk at work, drop those that wait."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _run(self, offset: int, length: int) -> None:
        got = self._prepare(offset, length)
        if got != self._got:
            logger.info("host KV arena from %s on: %s", format_size(offset), got)
            self._got = got


def _machine_memory(system: Path) -> int:
    for line in read_text(system / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise HardwareError("/proc/meminfo does not tell how much memory is available")


def _left(group: Path) -> int | None:
    """Bytes left under the group's limit, or None if it has none.

    Page cache that the kernel would drop counts as left.
    """
    limit = read_text(group / "memory.max") or read_text(group / "memory.limit_in_bytes")
    used = read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")
    if not used or not limit.strip().isdigit() or int(limit) >= UNLIMITED:
        return None
    stat = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
    return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
