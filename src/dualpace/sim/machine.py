"""A simulated machine from a profile, and the policies as they would be set up on it.

Puts profile, cost model, policy and durations together; the replay is `sim.replay`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import RequestRecord
from dualpace.bench.replay import Progress
from dualpace.core.config import PolicyName
from dualpace.core.errors import ConfigError
from dualpace.core.plan import ROUTES, Route
from dualpace.policy.gated import longest_request
from dualpace.policy.host import HostRules, default_itl_target, runnable, why_no_help
from dualpace.policy.registry import make_policy
from dualpace.policy.view import Policy
from dualpace.profile.table import Profile
from dualpace.sim.hardware import Durations
from dualpace.sim.replay import MAX_ROWS, replay

MAX_KV_TOKENS = 100_000_000  # of a tier: each page is an object here
MIN_COPY_BANDWIDTH = 1e3  # bytes per second: any slower, and copies outlast every load


@dataclass(frozen=True)
class Machine:
    """What a profile tells of: `policy` gives one set up for it, `replay` runs a load under it.

    routes: those that its CPU engine has, as far as the profile covers them. Raises `ConfigError`
    for more KV than can be simulated, or slower copies.
    """

    profile: Profile
    routes: tuple[Route, ...] = ROUTES

    def __post_init__(self) -> None:
        rooms = {"GPU": self.profile.gpu_kv_tokens, "host": self.profile.host_kv_tokens}
        for tier, tokens in rooms.items():
            if tokens > MAX_KV_TOKENS:
                raise ConfigError(
                    f"--{tier.lower()}-kv-tokens {tokens}: a simulated {tier} has KV room for "
                    f"{MAX_KV_TOKENS} tokens at most"
                )
        gbps = self.profile.copy_bandwidth / 1e9
        if gbps < MIN_COPY_BANDWIDTH / 1e9:
            raise ConfigError(
                f"--copy-gbps {gbps:g}: copies between the tiers cannot be simulated at less than "
                f"{MIN_COPY_BANDWIDTH / 1e9:g}"
            )

    @property
    def gpu_pages(self) -> int:
        return self.profile.gpu_kv_tokens // self.profile.fingerprint.page_tokens

    @property
    def host_pages(self) -> int:
        return self.profile.host_kv_tokens // self.profile.fingerprint.page_tokens

    def largest_request(self, policy: PolicyName) -> int:
        """Tokens of prompt and output that some tier can hold."""
        page_tokens = self.profile.fingerprint.page_tokens
        if policy == "gated":
            return longest_request(self.gpu_pages, page_tokens)
        pages = self.gpu_pages if policy == "gpu-only" else max(self.gpu_pages, self.host_pages)
        return pages * page_tokens

    def host_rules(self, cpu_itl_target: float | None = None) -> HostRules:
        """What bounds the host here; the target is the profile's own by default, seconds."""
        costs = self.profile.cost_model()
        routes = runnable(costs, self.routes)
        if not routes:
            raise ConfigError("the profile covers no way to run CPU iterations")
        if cpu_itl_target is None:
            cpu_itl_target = default_itl_target(costs, routes, MAX_ROWS, self.profile.gpu_kv_tokens)
        return HostRules(costs, cpu_itl_target, routes)

    def why_no_help(self, rules: HostRules) -> str | None:
        """Why the host would add nothing, or None."""
        profile = self.profile
        if not self.gpu_pages:
            return None
        return why_no_help(rules, profile.host_kv_tokens, profile.gpu_kv_tokens, MAX_ROWS)

    def policy(
        self,
        name: PolicyName,
        rules: HostRules | None = None,
        gpu_itl_target: float | None = None,
    ) -> Policy:
        """The policy called `name`, by `rules` (default: `host_rules()`)."""
        if name == "gpu-only":
            return make_policy(name, MAX_ROWS)
        rules = rules or self.host_rules()
        layers = self.profile.fingerprint.num_layers
        return make_policy(name, MAX_ROWS, rules, gpu_itl_target, layers)

    def replay(
        self,
        load: Sequence[LoadRequest],
        policy: Policy,
        max_tokens: int,
        *,
        max_concurrency: int | None = None,
        seconds: float | None = None,
        whole_prompts: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> tuple[list[RequestRecord], Durations]:
        """The records of `load`, and how many steps there were. max_tokens: of a step; the others
        are those of `sim.replay`."""
        profile = self.profile
        durations = Durations(
            profile.cost_model(), profile.fingerprint.page_bytes, profile.copy_bandwidth
        )
        host_pages = self.host_pages if policy.uses_host else 0
        hardware = durations.hardware(self.gpu_pages, host_pages, profile.fingerprint.page_tokens)
        records = replay(
            load, hardware, policy, max_tokens,
            max_concurrency=max_concurrency, seconds=seconds, whole_prompts=whole_prompts,
            on_progress=on_progress,
        )  # fmt: skip
        return records, durations
