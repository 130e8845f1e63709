"""Host memory: how much this process may use, and the KV arena that all engines share.

The arena is a memfd: it has no name in any file system, so nothing is left behind when the last
process that maps it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from dualpace.core.config import format_size
from dualpace.core.errors import ConfigError

CGROUP_ROOT = Path("/sys/fs/cgroup")
AUTO_SHARE = 0.5  # of the memory left beside the weights, for "auto"


def available_memory(root: Path = CGROUP_ROOT, proc: Path = Path("/proc")) -> int:
    """Bytes that can still be used: the least that the machine or a cgroup above us has left."""
    return min([_machine_memory(proc), *_cgroup_memory(root, proc)])


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


def _machine_memory(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not tell how much memory is available")


def _cgroup_memory(root: Path, proc: Path) -> Iterator[int]:
    """What is left under each memory limit of our control group and its ancestors (v2 and v1)."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        while group.is_relative_to(base):
            left = _left(group, limit, usage)
            if left is not None:
                yield left
            group = group.parent


def _left(group: Path, limit: str, usage: str) -> int | None:
    """Bytes left in one control group, page cache that can be dropped counted as left."""
    try:
        most = (group / limit).read_text().strip()
        if most == "max" or int(most) >= 2**60:
            return None
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(most) - used + int(stat.get("inactive_file", 0)))
