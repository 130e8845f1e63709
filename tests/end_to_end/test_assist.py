"""GPU Dense Assist on the stand-in: the same tokens on every route, from iteration to iteration."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from dualpace.core.plan import Batch, Route
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.chunks import prefill_budget, prefill_chunks
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView

STEPS = 24
ROUTES: dict[str, tuple[Route, ...]] = {
    "one slot": ("assist",),
    "two slots": ("assist2",),
    "switching": ("assist2", "local", "assist", "local", "assist2", "assist"),
}


class HostPolicy:
    """Every request is prefilled for the host and decoded there."""

    uses_host = True

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        return GpuDecision(
            reserve=tuple(row.id for row in view.waiting),
            prefill=prefill_chunks(
                view.prefilling, prefill_budget(view, len(view.decoding)), view.page_tokens
            ),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        return CpuDecision(run=tuple(row.id for row in view.rows))


class Routes:
    """Takes turns between routes, and remembers what was asked."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._next = cycle(routes)
        self.taken: list[Route] = []

    def __call__(self, batch: Batch) -> Route:
        self.taken.append(next(self._next))
        return self.taken[-1]


def decode(engines: Any, states: list[RequestState], routes: tuple[Route, ...]) -> Any:
    engines.route = Routes(routes)
    run = engines.run(HostPolicy(), states)
    assert set(engines.route.taken) == set(routes)
    engines.route = Routes(("local",))
    return run


@pytest.fixture
def engines_of(make_torch_engines: Callable[..., Any]) -> Callable[..., Any]:
    return lambda checkpoint: make_torch_engines(checkpoint.source)


@pytest.mark.parametrize("routes", ROUTES.values(), ids=list(ROUTES))
def test_greedy_tokens_equal_transformers(
    checkpoint: Any, routes: tuple[Route, ...], engines_of: Callable[..., Any]
) -> None:
    params = DecodeParams(max_tokens=STEPS)
    states = [
        RequestState(f"r{i}", i, 0, list(prompt), [], params)
        for i, prompt in enumerate(checkpoint.prompts)
    ]
    run = decode(engines_of(checkpoint), states, routes)
    assert list(run.tokens.values()) == [answer[:STEPS] for answer in checkpoint.answers]
    assert {tuple(made) for made in run.engines.values()} == {("gpu", *["cpu"] * (STEPS - 1))}


@pytest.mark.parametrize("routes", ROUTES.values(), ids=list(ROUTES))
def test_sampling_rules_and_logprobs_are_those_of_the_local_route(
    smollm2: Any, routes: tuple[Route, ...], engines_of: Callable[..., Any]
) -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 2**64 - 1},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 100, "min_p": 0.01, "seed": 3, "logprobs": 2},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 5},
        {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": ((5, 3.0), (9, -3.0))},
        {"stop_ids": (smollm2.answers[0][3],), "min_tokens": 12},
    ]

    def states() -> list[RequestState]:
        return [
            RequestState(
                f"r{i}", i, 0, list(smollm2.prompts[i % 2]), [], DecodeParams(max_tokens=16, **each)
            )
            for i, each in enumerate(rules)
        ]

    engines = engines_of(smollm2)
    local, assisted = (decode(engines, states(), each) for each in (("local",), routes))
    assert assisted.tokens == local.tokens
    for request_id, wanted in local.logprobs.items():
        for got, exact in zip(assisted.logprobs[request_id], wanted, strict=True):
            assert got.rank == exact.rank
            assert got.logprob == pytest.approx(exact.logprob, abs=1e-3)
            assert got.top_logprobs == pytest.approx(exact.top_logprobs, abs=1e-3)


class Failing:
    """The service's mailbox, into which every so many layers a failure is thrown."""

    def __init__(self, mailbox: Any, every: int) -> None:
        self._mailbox, self._every, self._layers = mailbox, every, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mailbox, name)

    def post_done(self, slot: int, layer: int) -> None:
        self._layers += 1
        if self._layers % self._every == 0:
            raise RuntimeError("as the test wishes")
        self._mailbox.post_done(slot, layer)


@pytest.mark.parametrize("route", ["assist", "assist2"])
def test_iterations_that_fail_midway_change_no_token(
    tiny: Any, route: Route, engines_of: Callable[..., Any]
) -> None:
    params = DecodeParams(max_tokens=STEPS)
    states = [
        RequestState(f"r{i}", i, 0, list(prompt), [], params)
        for i, prompt in enumerate(tiny.prompts)
    ]
    engines = engines_of(tiny)
    service = engines.gpu._runner._assist
    whole = service._mailbox
    service._mailbox = Failing(whole, 23)
    try:
        run = decode(engines, states, (route,))
    finally:
        service._mailbox = whole
    assert list(run.tokens.values()) == [answer[:STEPS] for answer in tiny.answers]
