"""Policies by name."""

from __future__ import annotations

from dualpace.core.config import PolicyName
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.host import HostRules
from dualpace.policy.view import Policy


def make_policy(
    name: PolicyName,
    max_host_rows: int,
    host: HostRules | None = None,
    gpu_itl_target: float | None = None,
) -> Policy:
    """The policy called `name`; the other arguments are those of `DualPacePolicy`."""
    match name:
        case "dualpace":
            return DualPacePolicy(max_host_rows, host, gpu_itl_target)
        case "gpu-only":
            return GpuOnlyPolicy()
