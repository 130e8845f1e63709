"""Policies by name."""

from __future__ import annotations

from dualpace.core.config import PolicyName
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.view import Policy


def make_policy(name: PolicyName, max_host_rows: int) -> Policy:
    """The policy called `name`."""
    match name:
        case "dualpace":
            return DualPacePolicy(max_host_rows)
        case "gpu-only":
            return GpuOnlyPolicy()
