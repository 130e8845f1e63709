"""Which cores are chosen, on made-up machines; and that a waiting pool costs no CPU time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from dualpace.core.errors import ConfigError
from dualpace.cpu import _native
from dualpace.cpu.threads import choose_cores, cpu_quota


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a /proc and /sys below `tmp_path`: which CPUs are allowed, and which share a core."""

    def make(cpus: list[int], cores: dict[int, int] | None = None) -> Path:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
        for cpu, core in (cores or {}).items():
            topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "core_id").write_text(f"{core}\n")
            (topology / "physical_package_id").write_text("0\n")
        return tmp_path

    return make


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {
    "proc/self/cgroup": "0::/pod/app\n",
    "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
}


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (2, 1), (7, 6), (8, 5), (16, 13)])
def test_some_cores_are_left_to_the_others(machine, count, chosen):
    root = machine(list(range(4, 4 + count)))
    assert choose_cores(system=root) == tuple(range(4, 4 + chosen))


def test_siblings_come_after_all_physical_cores(machine):
    root = machine(list(range(8)), {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3})
    assert choose_cores(8, system=root) == (0, 2, 4, 6, 1, 3, 5, 7)


def test_more_cores_than_affinity_allows_are_refused(machine):
    root = machine([0, 1])
    assert choose_cores(2, system=root) == (0, 1)
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=rf"--cpu-cores must be between 1 and 2.*got {wrong}"):
            choose_cores(wrong, system=root)


@pytest.mark.parametrize(
    ("own", "parent", "quota"),
    [("max 100000", "max 100000", None), ("400000 100000", "250000 100000", 2.5),
     ("50000 100000", "max 100000", 0.5)],
)  # fmt: skip
def test_the_tightest_quota_of_own_and_ancestor_groups_counts(machine, own, parent, quota):
    root = machine(list(range(8)))
    write(root, {**V2, "sys/fs/cgroup/pod/app/cpu.max": own, "sys/fs/cgroup/pod/cpu.max": parent})
    assert cpu_quota(root) == quota
    if quota is not None:
        limit = max(1, int(quota))
        assert len(choose_cores(limit, system=root)) == limit
        with pytest.raises(ConfigError, match=f"CPU quota of {quota}"):
            choose_cores(limit + 1, system=root)


def test_version_1_quotas_are_read_where_a_container_mounts_its_own_group(machine):
    root = machine(list(range(8)))
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n0::/\n",
            "proc/self/mountinfo": (
                "32 31 0:29 /docker/x /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root) == 3.0


def test_the_calling_thread_gets_its_affinity_back():
    before = os.sched_getaffinity(0)
    engine = _native.Engine(sorted(before)[:1])
    one = np.zeros((1, 4), np.float32)
    engine.linear(one, np.zeros((4, 4), np.float32), None, one.copy())
    assert os.sched_getaffinity(0) == before


def test_a_waiting_pool_burns_no_cpu():
    engine = _native.Engine(sorted(os.sched_getaffinity(0))[:2])
    assert engine.num_threads >= 1
    time.sleep(0.05)  # past the spinning
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1
    del engine
