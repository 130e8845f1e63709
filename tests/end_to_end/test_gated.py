"""Gated steps on both real engines: the same tokens from either tier, half and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dualpace.core.plan import PENDING, Batch, StepResult, Ticket
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.cost_model import Point, TableCostModel
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView

STEPS = 64
GPU_PAGES, HOST_PAGES = 18, 120  # of 16 tokens; the longest request needs 7
# The dense layers take 10 ms; the CPU attends to 250 tokens meanwhile.
COSTS = TableCostModel(
    [
        point
        for size in (1, 1000)
        for context in (0, 100_000)
        for point in (
            Point("gpu_decode", size, context, 10e-3 + 1e-6 * context),
            Point("gpu_prefill", size, context, 10e-3 + 1e-5 * size + 1e-6 * context),
            Point("cpu_attention", size, context, 4e-5 * context),
        )
    ]
)


class Watched:
    """NEO's policy, and which halves of its steps had host rows."""

    uses_host = True

    def __init__(self) -> None:
        self._policy = GatedPolicy(COSTS, layers=1, launch=0.0)
        self.gates: set[tuple[bool, bool]] = set()

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        decision = self._policy.plan_gpu(view)
        self.gates.add((bool(decision.gate[0]), bool(decision.gate[1])))
        return decision

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        return CpuDecision()


def serve(engines: Any, states: list[RequestState], gpu_depth: int) -> Any:
    """`states` by gated steps, in which both tiers and both halves have had their part, and by
    others, planned ahead where the engine has more than one step under way."""
    policy = Watched()
    ahead = 0
    launch = engines.gpu.launch

    def count(step: Batch) -> Ticket[StepResult]:
        nonlocal ahead
        ahead += any(row.tokens == [PENDING] for row in step.rows)
        return launch(step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engines.gpu, "launch", count)
        run = engines.run(policy, states, gpu_depth)
    assert (ahead > 0) == (gpu_depth > 1)
    assert (True, True) in policy.gates
    assert min(run.moves[move] for move in ("gated", "promoted", "demoted")) > 0
    return run


def test_greedy_tokens_equal_transformers(
    checkpoint: Any, gpu_depth: int, make_gated_engines: Callable[..., Any]
) -> None:
    params = DecodeParams(max_tokens=STEPS)
    prompts = checkpoint.prompts * (10 // len(checkpoint.prompts))
    states = [RequestState(f"r{i}", i, 0, list(each), [], params) for i, each in enumerate(prompts)]
    run = serve(make_gated_engines(checkpoint.source, GPU_PAGES, HOST_PAGES), states, gpu_depth)
    answers = checkpoint.answers * (10 // len(checkpoint.answers))
    assert list(run.tokens.values()) == answers


@pytest.mark.parametrize("depth", [1, 2])
def test_sampling_rules_and_logprobs_are_those_of_ungated_steps(
    tiny: Any, depth: int, make_gated_engines: Callable[..., Any]
) -> None:
    rules: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 2**64 - 1},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 100, "min_p": 0.01, "seed": 3, "logprobs": 2},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 5},
        {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": ((5, 3.0), (9, -3.0))},
        {"stop_ids": (tiny.answers[0][3],), "min_tokens": 12},
    ]  # fmt: skip
    states = [
        RequestState(
            f"r{i}", i, 0, list(tiny.prompts[i % 5]), [],
            DecodeParams(max_tokens=STEPS, **rules[i % len(rules)]),
        )
        for i in range(10)
    ]  # fmt: skip
    engines = make_gated_engines(tiny.source, GPU_PAGES, HOST_PAGES)
    copies = msgspec.convert(msgspec.to_builtins(states), list[RequestState])
    gated = serve(engines, copies, depth)
    alone = make_gated_engines(tiny.source, 200, HOST_PAGES).run(Watched(), states)
    assert alone.moves["gated"] == 0
    assert gated.tokens == alone.tokens
    for request_id, wanted in alone.logprobs.items():
        for got, exact in zip(gated.logprobs[request_id], wanted, strict=True):
            assert got.rank == exact.rank
            assert got.logprob == pytest.approx(exact.logprob, abs=1e-3)
