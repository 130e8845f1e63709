"""Host memory: how much this process may use, and the KV arena that all engines share.

The arena is a memfd: it has no name in any file system, so nothing is left behind when the last
process that maps it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from dualpace.core.config import format_size
from dualpace.core.errors import ConfigError, HardwareError
from dualpace.cpu.cgroups import SYSTEM, control_groups, read_text

UNLIMITED = 2**60  # version 1 groups say so with a very large number
AUTO_SHARE = 0.5  # of the memory left beside the weights, for "auto"


def available_memory(system: Path = SYSTEM) -> int:
    """Bytes that can still be used: the least that the machine or a cgroup above us has left."""
    left = [_left(folder) for folder in control_groups("memory", system)]
    return min([_machine_memory(system), *(some for some in left if some is not None)])


def host_pages(
    flag: str, asked: int | None, page_bytes: int, reserved: int, most_pages: int
) -> int:
    """Pages of the host KV arena.

    asked: bytes from the user, None for auto; reserved: bytes that weights will take on the host;
    most_pages: pages beyond which no request could use more. Raises `ConfigError` with the numbers
    if what was asked for does not fit; auto shrinks instead.
    """
    left = max(0, available_memory() - reserved)
    if asked is None:
        return min(int(left * AUTO_SHARE) // page_bytes, most_pages)
    if asked > left:
        raise ConfigError(
            f"--{flag} {format_size(asked)} of host memory does not fit: {format_size(left)} is "
            f"left beside {format_size(reserved)} of weights"
        )
    return asked // page_bytes


def create_arena(size: int) -> int:
    """A file descriptor of `size` bytes of shared memory, inherited only where passed on."""
    descriptor = os.memfd_create("dualpace-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def map_arena(descriptor: int, size: int) -> mmap.mmap:
    """Map the arena, readable and writable."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED)


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
