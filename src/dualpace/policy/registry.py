"""Policies by name."""

from __future__ import annotations

from dualpace.core.config import PolicyName
from dualpace.core.errors import ConfigError
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gated import GATED_OPERATIONS, GatedPolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.host import HostRules
from dualpace.policy.view import Policy


def uses_host(name: PolicyName) -> bool:
    """True if the policy called `name` keeps KV on the host."""
    return name != "gpu-only"


def make_policy(
    name: PolicyName,
    max_host_rows: int,
    host: HostRules | None = None,
    gpu_itl_target: float | None = None,
    layers: int = 0,
) -> Policy:
    """The policy called `name`. `layers` of the model are for "gated", which also needs costs; the
    other arguments are those of `DualPacePolicy`."""
    match name:
        case "dualpace":
            return DualPacePolicy(max_host_rows, host, gpu_itl_target)
        case "gpu-only":
            return GpuOnlyPolicy()
        case "gated":
            if host is None or not host.costs.covers(*GATED_OPERATIONS):
                raise ConfigError(
                    "gated scheduling needs a profile with CPU attention in it; without a GPU "
                    "`dualpace profile run MODEL --policy gated` measures one"
                )
            return GatedPolicy(host.costs, layers)
