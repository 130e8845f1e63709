"""How much more than the GPU alone a GPU and its host can make at best.

Prefill is the GPU's under every policy, so that it cancels: the output rate over the GPU's own is
at most `1 + h / G0 - a`, with h the host's token rate, G0 the GPU's own pure decode rate at its
seats, and a the part of the GPU's time that assists take.
"""

from __future__ import annotations

from typing import NamedTuple

from dualpace.policy.cost_model import stolen_share
from dualpace.policy.host import HostRules, gpu_token_rate


class Roof(NamedTuple):
    """Tokens per second, and parts of one."""

    host_rate: float
    gpu_rate: float
    stolen_share: float

    @property
    def ratio(self) -> float:
        """The best output rate over the GPU's own."""
        return 1.0 + self.host_rate / self.gpu_rate - self.stolen_share


def find_roof(
    rules: HostRules, gpu_tokens: int, host_tokens: int, max_rows: int, context: int
) -> Roof | None:
    """For requests of `context` tokens each, with KV room for so many tokens in either tier, and
    the route and the batch that `rules` would choose. None where either tier has no room for one,
    or the GPU's steps were not measured."""
    gpu_rate = gpu_token_rate(rules.costs, gpu_tokens, max_rows, context)
    rows = min(host_tokens // context, max_rows)
    if not gpu_rate or not rows:
        return None
    rows, route = rules.choose([context] * rows, gpu_rate, 0.0, rules.routes[0])
    seconds = rules.seconds(route, rows, rows * context, 0.0)
    taken = stolen_share(rules.costs, route, rows, rows * context, 0.0)
    return Roof(rows / seconds, gpu_rate, taken)
