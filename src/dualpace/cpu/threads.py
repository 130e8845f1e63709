"""Which cores the CPU engine may take.

Knows affinity, control groups and the topology in /sys; does not start threads. The engine leaves
some cores to the others (frontend, GPU launch path), which starve if it takes all.
"""

from __future__ import annotations

import os
from pathlib import Path

from dualpace.core.errors import ConfigError
from dualpace.cpu.cgroups import SYSTEM, control_groups, read_text


def choose_cores(requested: int | None = None, *, system: Path = SYSTEM) -> tuple[int, ...]:
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


def allowed_cores(*, system: Path = SYSTEM) -> tuple[int, ...]:
    """CPU ids that affinity allows, no more than the CPU quota is worth, physical cores first."""
    cpus = _physical_first(sorted(os.sched_getaffinity(0)), system)
    quota = cpu_quota(system)
    return tuple(cpus if quota is None else cpus[: max(1, int(quota))])


def cpu_quota(system: Path = SYSTEM) -> float | None:
    """CPUs' worth of time the control groups grant, own and ancestors (the least), or None."""
    quotas = [
        quota
        for folder in control_groups("cpu", system)
        if (quota := _quota_v2(folder) or _quota_v1(folder)) is not None
    ]
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    words = read_text(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(folder: Path) -> float | None:
    quota = read_text(folder / "cpu.cfs_quota_us").strip()
    period = read_text(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _physical_first(cpus: list[int], system: Path) -> list[int]:
    """`cpus` with the first thread of every physical core ahead of its siblings."""
    threads_seen: dict[tuple[str, str], int] = {}
    ranked: list[tuple[int, int]] = []
    for cpu in cpus:
        topology = system / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = read_text(topology / "core_id").strip()
        package = read_text(topology / "physical_package_id").strip()
        key = (package, core) if core else ("", f"cpu{cpu}")
        rank = threads_seen.get(key, 0)
        threads_seen[key] = rank + 1
        ranked.append((rank, cpu))
    return [cpu for _, cpu in sorted(ranked)]
