"""Which cores the CPU engine may take.

Knows affinity, control groups and the topology in /sys; does not start threads. The engine leaves
some cores to the others (frontend, GPU launch path), which starve if it takes all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dualpace.core.errors import ConfigError

_SYSTEM = Path("/")


def choose_cores(requested: int | None = None, *, system: Path = _SYSTEM) -> tuple[int, ...]:
    """CPU ids for the engine's threads, in order of use: one thread per core before siblings.

    requested: how many (`--cpu-cores`), or None for all that are allowed but a reserve of 3 (1 on
    a machine of 2 to 7, none on a machine of 1). system: where /proc and /sys are found. Raises
    `ConfigError` if more are requested than affinity and CPU quota allow.
    """
    cores = allowed_cores(system=system)
    if requested is None:
        reserve = 3 if len(cores) >= 8 else 1 if len(cores) >= 2 else 0
        return cores[: len(cores) - reserve]
    if not 1 <= requested <= len(cores):
        quota = cpu_quota(system)
        limit = "" if quota is None else f" under a CPU quota of {quota:g}"
        raise ConfigError(
            f"--cpu-cores must be between 1 and {len(cores)}, the cores this process may use"
            f"{limit}, got {requested}"
        )
    return cores[:requested]


def allowed_cores(*, system: Path = _SYSTEM) -> tuple[int, ...]:
    """CPU ids that affinity allows, no more than the CPU quota is worth, physical cores first."""
    cpus = _physical_first(sorted(os.sched_getaffinity(0)), system)
    quota = cpu_quota(system)
    return tuple(cpus if quota is None else cpus[: max(1, int(quota))])


def cpu_quota(system: Path = _SYSTEM) -> float | None:
    """CPUs' worth of time the control groups grant, own and ancestors (the least), or None."""
    quotas = [
        quota
        for folder in _cpu_groups(system)
        if (quota := _quota_v2(folder) or _quota_v1(folder)) is not None
    ]
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(folder: Path) -> float | None:
    quota = _read(folder / "cpu.cfs_quota_us").strip()
    period = _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _cpu_groups(system: Path) -> Iterator[Path]:
    """Folders of this process's control group and its ancestors, where CPU time is controlled."""
    own: dict[str, str] = {}  # controller ("" for version 2) to group
    for line in _read(system / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), group))
    for line in _read(system / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            controller = ""
        elif kind == "cgroup" and "cpu" in options.split(","):
            controller = "cpu"
        else:
            continue
        if controller not in own:
            continue
        mount = system / mount_point.lstrip("/")
        # Inside a container the mount may show a subtree only, or the group may lie outside of it.
        path = PurePosixPath(own[controller])
        relative = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath(".")
        for part in (relative, *relative.parents):
            yield mount / part


def _physical_first(cpus: list[int], system: Path) -> list[int]:
    """`cpus` with the first thread of every physical core ahead of its siblings."""
    threads_seen: dict[tuple[str, str], int] = {}
    ranked: list[tuple[int, int]] = []
    for cpu in cpus:
        topology = system / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = _read(topology / "core_id").strip()
        package = _read(topology / "physical_package_id").strip()
        key = (package, core) if core else ("", f"cpu{cpu}")
        rank = threads_seen.get(key, 0)
        threads_seen[key] = rank + 1
        ranked.append((rank, cpu))
    return [cpu for _, cpu in sorted(ranked)]


def _read(path: Path) -> str:
    """The file's text, empty if it cannot be read: files come and go with kernel and container."""
    try:
        return path.read_text()
    except OSError:
        return ""
