"""Host memory: every limit above the process counts, and what does not fit is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dualpace.core.errors import ConfigError
from dualpace.cpu import memory
from dualpace.cpu.memory import available_memory, create_arena, host_pages, map_arena

GIB = 2**30
FILES = {
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
    "proc/self/cgroup": "0::/pod/app\n",
    "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/pod/app/memory.max": "max\n",
    "sys/fs/cgroup/pod/app/memory.current": "0\n",
    "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
}


def machine(root: Path, **changes: str) -> Path:
    for name, text in {**FILES, **changes}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_tightest_ancestor_counts_with_droppable_cache_as_free(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == 6 * GIB


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    changes = {"sys/fs/cgroup/pod/memory.max": "max\n"}
    assert available_memory(machine(tmp_path, **changes)) == 32 * GIB


def test_version_1_groups_count_too(tmp_path: Path) -> None:
    changes = {
        "proc/self/cgroup": "5:memory:/job\n0::/\n",
        "proc/self/mountinfo": "3 2 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert available_memory(machine(tmp_path, **changes)) == 3 * GIB


def test_auto_shrinks_and_a_size_that_does_not_fit_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * GIB)
    page = 2**20
    assert host_pages("host-kv-size", None, page, 2 * GIB, 10**9) == 4 * GIB // page
    assert host_pages("host-kv-size", None, page, 2 * GIB, 100) == 100
    assert host_pages("host-kv-size", None, page, 20 * GIB, 100) == 0
    assert host_pages("host-kv-size", 3 * GIB + 5, page, 2 * GIB, 1) == 3 * GIB // page
    numbers = re.escape("--host-kv-size 9 GiB of host memory does not fit: 8 GiB is left")
    with pytest.raises(ConfigError, match=numbers):
        host_pages("host-kv-size", 9 * GIB, page, 2 * GIB, 1)


def test_the_arena_is_one_memory_for_all_that_map_it() -> None:
    descriptor = create_arena(8192)
    one, other = map_arena(descriptor, 8192), map_arena(descriptor, 8192)
    os.close(descriptor)
    one[5000] = 7
    assert other[5000] == 7
