"""The same tokens, whoever makes them: both engines, any batch, a handoff at any position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from dualpace.core.plan import BatchRow, Tier
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.cpu import _native
from dualpace.cpu.model import CpuModel
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights
from dualpace.policy.chunks import prefill_budget, prefill_chunks
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView

STEPS = 64


class SwitchPolicy:
    """Starts every request on one tier, and moves it to the other once it has so many tokens.

    A request without an entry in `switch_at` stays where it starts. On the host it is held at its
    switching point until it has been recalled, so that the handoff falls on that very token.
    """

    uses_host = True

    def __init__(self, start: Tier, switch_at: dict[str, int] | None = None) -> None:
        self.start = start
        self.switch_at = switch_at or {}

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        waiting = tuple(row.id for row in view.waiting)
        at = self.switch_at.get
        return GpuDecision(
            admit=waiting if self.start == "gpu" else (),
            reserve=waiting if self.start == "host" else (),
            demote=tuple(row.id for row in view.decoding if row.tokens == at(row.id))
            if self.start == "gpu"
            else (),
            promote=tuple(row.id for row in view.host if row.tokens == at(row.id))
            if self.start == "host"
            else (),
            prefill=prefill_chunks(
                (*view.prefilling, *(view.waiting if self.start == "gpu" else ())),
                prefill_budget(view, len(view.decoding)),
                view.page_tokens,
            ),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        held = self.switch_at if self.start == "host" else {}
        return CpuDecision(run=tuple(row.id for row in view.rows if row.tokens != held.get(row.id)))


def requests(prompts: list[list[int]], **params: Any) -> list[RequestState]:
    settings = DecodeParams(**{"max_tokens": STEPS, **params})
    return [
        RequestState(f"r{i}", i, 0, list(prompt), [], settings) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_greedy_tokens_equal_transformers(
    checkpoint: Any, tier: Tier, gpu_depth: int, make_engines: Callable[..., Any]
) -> None:
    states = requests(checkpoint.prompts)
    run = make_engines(checkpoint.source).run(SwitchPolicy(tier), states, gpu_depth)
    assert list(run.tokens.values()) == checkpoint.answers
    # The first token is always the prefilling engine's.
    maker = "gpu" if tier == "gpu" else "cpu"
    assert {tuple(engines) for engines in run.engines.values()} == {("gpu", *[maker] * (STEPS - 1))}


@pytest.mark.parametrize("start", ["gpu", "host"])
def test_a_handoff_at_any_position_changes_no_token(
    checkpoint: Any, start: Tier, gpu_depth: int, make_engines: Callable[..., Any]
) -> None:
    prompt, answer = checkpoint.prompts[0], checkpoint.answers[0]
    states = requests([prompt] * (STEPS - 1))
    # Request i changes its engine when it has i + 1 output tokens.
    switch_at = {state.id: len(prompt) + i + 1 for i, state in enumerate(states)}
    policy = SwitchPolicy(start, switch_at)
    run = make_engines(checkpoint.source).run(policy, states, gpu_depth)
    first, second = ("gpu", "cpu") if start == "gpu" else ("cpu", "gpu")
    for i, state in enumerate(states):
        assert run.tokens[state.id] == answer
        expected = ["gpu"] + [first] * i + [second] * (STEPS - 1 - i)
        assert run.engines[state.id] == expected


def test_seeded_sampling_is_the_same_on_either_engine_and_in_any_batch(
    smollm2: Any, make_engines: Callable[..., Any]
) -> None:
    engines = make_engines(smollm2.source)
    styles: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.3, "top_k": 40, "seed": 2},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "top_k": 100, "seed": 2**64 - 1},
        {"temperature": 1.0, "presence_penalty": 1.2, "frequency_penalty": 0.7, "seed": 4},
        {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 50, "seed": 5},
    ]
    states = [
        RequestState(
            f"r{i}", i, 0, smollm2.prompts[i % 2], [], DecodeParams(max_tokens=24, **style)
        )
        for i, style in enumerate(styles)
    ]

    def run(
        policy: SwitchPolicy, some: list[RequestState], gpu_depth: int = 1
    ) -> dict[str, list[int]]:
        copies = msgspec.convert(msgspec.to_builtins(some), list[RequestState])
        tokens: dict[str, list[int]] = engines.run(policy, copies, gpu_depth).tokens
        return tokens

    on_gpu = run(SwitchPolicy("gpu"), states)
    assert run(SwitchPolicy("gpu"), states, gpu_depth=2) == on_gpu
    assert run(SwitchPolicy("host"), states) == on_gpu
    moving = {state.id: len(state.prompt) + 5 + i for i, state in enumerate(states)}
    assert run(SwitchPolicy("gpu", moving), states, gpu_depth=2) == on_gpu
    for state in states:
        assert run(SwitchPolicy("host"), [state]) == {state.id: on_gpu[state.id]}
    assert len({tuple(tokens) for tokens in on_gpu.values()}) == len(states)


def test_penalties_and_logprobs_equal_transformers_whoever_decodes(
    smollm2: Any, make_engines: Callable[..., Any]
) -> None:
    assert smollm2.penalized != smollm2.answers[0]
    prompt = smollm2.prompts[0]
    params = DecodeParams(max_tokens=STEPS, repetition_penalty=1.4, logprobs=3)
    for start, depth in (("gpu", 1), ("gpu", 2), ("host", 2)):
        states = [RequestState(f"r{i}", i, 0, list(prompt), [], params) for i in range(3)]
        policy = SwitchPolicy(start, {"r1": len(prompt) + 9, "r2": len(prompt) + 30})
        run = make_engines(smollm2.source).run(policy, states, depth)
        assert len(set(run.engines["r1"])) == 2
        for tokens, reported in zip(run.tokens.values(), run.logprobs.values(), strict=True):
            assert tokens == smollm2.penalized
            assert len(reported) == STEPS
            for token, got, exact in zip(tokens, reported, smollm2.penalized_logprobs, strict=True):
                assert got.logprob == pytest.approx(float(exact[token]), abs=1e-3)
                assert got.top_logprobs == pytest.approx(exact.topk(3).values.tolist(), abs=1e-3)


def test_min_tokens_holds_stop_ids_back_on_either_engine(
    smollm2: Any, make_engines: Callable[..., Any]
) -> None:
    engines = make_engines(smollm2.source)
    prompt, answer = smollm2.prompts[0], smollm2.answers[0]
    stop_id = answer[3]
    for tier, depth in (("gpu", 1), ("gpu", 2), ("host", 1)):
        ended = engines.run(SwitchPolicy(tier), requests([prompt], stop_ids=(stop_id,)), depth)
        assert ended.tokens["r0"] == answer[: answer.index(stop_id) + 1]
        states = requests([prompt], stop_ids=(stop_id,), min_tokens=20)
        held = engines.run(SwitchPolicy(tier), states, depth)
        assert len(held.tokens["r0"]) >= 20
        assert stop_id not in held.tokens["r0"][:20]


@pytest.mark.parametrize("isa", [*_native.supported_isas(), "amx_emulated"])
def test_bfloat16_logits_of_the_real_model_stay_within_one_percent(smollm2: Any, isa: str) -> None:
    """Of transformers in fp32 with the same weights, over all positions of a chat prompt."""
    spec = load_spec(smollm2.source)
    weights = iter_weights(smollm2.source, spec, "bfloat16")
    model = CpuModel(spec, weights, dtype="bfloat16", cores=(0,), isa=isa)
    arena = bytearray(spec.page_bytes(32, 2))
    logits = []
    for position, token in enumerate(smollm2.chat):
        row = BatchRow("chat", [token], position, [0], "host", True, DecodeParams())
        logits.append(model.decode([row], arena, 32, return_logits=True).logits[0])
    error = np.array(logits) - smollm2.chat_logits
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(smollm2.chat_logits)


def test_bfloat16_prompts_of_the_real_model_leave_logits_within_one_and_a_half_percent(
    smollm2: Any,
) -> None:
    """Prompts go without what decodes have against rounding; transformers' bf16 is 3.3% off."""
    spec = load_spec(smollm2.source)
    weights = iter_weights(smollm2.source, spec, "bfloat16")
    model = CpuModel(spec, weights, dtype="bfloat16", cores=(0,))
    arena = bytearray(spec.page_bytes(32, 2))
    logits = []
    for end, token in enumerate(smollm2.chat[1:], start=1):
        chunk = BatchRow("chat", smollm2.chat[:end], 0, [0], "host", False, DecodeParams())
        assert model.step([chunk], arena, 32).tokens == [None]
        row = BatchRow("chat", [token], end, [0], "host", True, DecodeParams())
        logits.append(model.decode([row], arena, 32, return_logits=True).logits[0])
    expected = smollm2.chat_logits[1:]
    error = np.array(logits) - expected
    assert np.linalg.norm(error) < 0.015 * np.linalg.norm(expected)
