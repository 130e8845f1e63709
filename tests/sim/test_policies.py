"""Policies against each other on one simulated machine, with the product's schedulers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from dualpace.bench.load import LengthModel, LogNormal, arrive_at_once, arrive_poisson
from dualpace.bench.metrics import summarize
from dualpace.bench.record import RequestRecord
from dualpace.core.messages import CPU, AnyMessage, Handoff
from dualpace.core.plan import Route
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.cost_model import Part, Point, TableCostModel
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.host import HostRules
from dualpace.policy.view import GpuDecision, GpuView, Policy
from dualpace.profile.shipped import open_profile
from dualpace.sim.hardware import Durations
from dualpace.sim.replay import replay
from dualpace.sim.world import Hardware, World

CHAT = LengthModel(LogNormal(700, 900), LogNormal(180, 256), max_prompt=3000, max_output=900)
ALL: tuple[Route, ...] = ("local", "assist", "assist2")


class NaiveRouter(DualPacePolicy):
    """Who finds no seat is sent to the host for good."""

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        return super().plan_gpu(msgspec.structs.replace(view, host=()))


def machine(name: str, host: bool = True) -> tuple[TableCostModel, Hardware]:
    profile = open_profile(name)
    costs = profile.cost_model()
    durations = Durations(costs, profile.fingerprint.page_bytes, profile.copy_bandwidth)
    page = profile.fingerprint.page_tokens
    pages = profile.host_kv_tokens // page if host else 0
    return costs, durations.hardware(profile.gpu_kv_tokens // page, pages, page)


def slowest(records: list[RequestRecord]) -> float:
    """p99 of the end-to-end latency, seconds."""
    latencies = sorted(record.end_s - record.sent_s for record in records)
    return latencies[int(0.99 * len(latencies))]


def test_sending_requests_to_the_host_for_good_makes_a_tail_that_seats_in_order_do_not() -> None:
    load = arrive_at_once(CHAT.generate(300, seed=3))
    costs, hardware = machine("h200-llama-3.1-8b")
    rules = HostRules(costs, 1.0)

    def tail(policy: Policy) -> float:
        return slowest(replay(load, hardware, policy, max_tokens=1024))

    gpu_only = tail(GpuOnlyPolicy())
    assert tail(NaiveRouter(256, rules)) > 2 * gpu_only
    assert tail(DualPacePolicy(256, rules)) < gpu_only


@pytest.mark.parametrize(
    ("name", "requests", "least"),
    [("h200-llama-3.1-8b", 300, 1.05), ("h200-llama-3.1-70b", 160, 1.3)],
)
def test_the_host_adds_throughput_on_the_reference_machine(
    name: str, requests: int, least: float
) -> None:
    load = arrive_at_once(CHAT.generate(requests, seed=4))
    costs, hardware = machine(name)
    routes = ALL if costs.covers("cpu_iteration") else ALL[1:]
    rules = HostRules(costs, 0.6, routes)

    def rate(policy: Policy) -> float:
        records = replay(load, hardware, policy, max_tokens=1024)
        summary = summarize(records)
        assert summary.failed == 0
        return summary.output_tokens / max(record.end_s for record in records)

    assert rate(DualPacePolicy(256, rules)) > least * rate(GpuOnlyPolicy())


@pytest.mark.parametrize("seed", range(4))
def test_a_request_moves_a_few_times_at_most_and_never_stands_still(seed: int) -> None:
    """Under more load than the machine can take. Where rows take turns, a token of the CPU
    engine comes two iterations after the one before, or three where the request has moved."""
    costs, hardware = machine("h200-llama-3.1-8b")
    world = World(hardware, DualPacePolicy(256, HostRules(costs, 0.5, ALL)), 256, 1024,
                  check_kv=False)  # fmt: skip
    handoffs: Counter[str] = Counter()
    send = world.network.send

    def counted(sender: str, to: str, body: AnyMessage) -> None:
        if to == CPU and isinstance(body, Handoff):
            handoffs[body.state.id] += 1
        send(sender, to, body)

    world.network.send = counted  # type: ignore[method-assign]
    load = arrive_poisson(CHAT.generate(250, seed), rate=20.0, seed=seed)
    for number, asked in enumerate(load):
        params = DecodeParams(max_tokens=asked.output_tokens)
        state = RequestState(f"r{number}", number, 0, [0] * asked.prompt_tokens, [], params)
        world.submit(asked.arrival_s, state)
    world.run()
    assert all(stream.complete for stream in world.streams.values())
    assert handoffs
    assert max(handoffs.values()) <= 3
    assert sum(count > 1 for count in handoffs.values()) <= 0.1 * len(load)
    for stream in world.streams.values():
        tokens = [stream.tokens[index] for index in range(stream.count or 0)]
        gaps = [after[1] - before[1] for before, after in pairwise(tokens) if after[2] == "cpu"]
        assert max(gaps, default=0.0) < 3 * 0.5


def test_a_full_host_keeps_its_target_with_nobody_waiting_a_turn() -> None:
    """Rows grow and prompts come beside, so a host that is filled to its target has rows that sit
    out every other iteration: twice the target, to those that it happens to."""
    costs, hardware = machine("h200-llama-3.1-70b")
    target = 0.3
    load = arrive_at_once(CHAT.generate(500, seed=5))
    policy = DualPacePolicy(256, HostRules(costs, target, ALL[1:]))
    records = replay(load, hardware, policy, max_tokens=1024, max_concurrency=160, seconds=150)
    window = summarize(records, (50.0, 150.0)).window
    assert window is not None
    itl = window.itl_by_engine_s["cpu"]
    assert itl.count > 10_000
    assert itl.p50 is not None
    assert itl.p99 is not None
    assert 0.8 * target < itl.p50
    assert itl.p99 < 1.2 * target


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_rows_on_the_gpu_keep_their_pace_whatever_assists_take_from_prompts(factor: float) -> None:
    """So many times what the policy knows of."""
    profile = open_profile("h200-llama-3.1-70b")
    known = [p for p in profile.points if not p.operation.endswith("stolen_beside_prefill")]
    beside: dict[str, Part] = {
        "assist_stolen": "assist_stolen_beside_prefill",
        "assist2_stolen": "assist2_stolen_beside_prefill",
    }

    def times(factor: float) -> list[Point]:
        """What assists take from prompts as a multiple of what they take from decodes."""
        taken = [p for p in known if p.operation in beside]
        return [Point(beside[p.operation], p.size, 0, factor * p.seconds) for p in taken]

    costs = TableCostModel([*known, *times(1.0)])
    page = profile.fingerprint.page_tokens
    load = arrive_at_once(CHAT.generate(500, seed=5))

    def itl(policy: Policy) -> float:
        """P99 of rows on the GPU, seconds."""
        durations = Durations(
            TableCostModel([*known, *times(factor)]),
            profile.fingerprint.page_bytes, profile.copy_bandwidth,
        )  # fmt: skip
        pages = profile.host_kv_tokens // page if policy.uses_host else 0
        hardware = durations.hardware(profile.gpu_kv_tokens // page, pages, page)
        records = replay(load, hardware, policy, max_tokens=1024, max_concurrency=160, seconds=120)
        window = summarize(records, (40.0, 120.0)).window
        assert window is not None
        p99 = window.itl_by_engine_s["gpu"].p99
        assert p99 is not None
        return p99

    alone = itl(GpuOnlyPolicy())
    assert itl(DualPacePolicy(256, HostRules(costs, 0.6, ALL[1:]))) < 1.1 * alone


def test_a_host_that_is_hardly_used_costs_nothing() -> None:
    """Room for one request on the host: within one percent of gpu-only."""
    load = arrive_at_once(CHAT.generate(200, seed=5))
    costs, hardware = machine("h200-llama-3.1-8b")

    def end(policy: Policy) -> float:
        return max(record.end_s for record in replay(load, hardware, policy, max_tokens=1024))

    assert end(DualPacePolicy(1, HostRules(costs, 0.2))) < 1.01 * end(GpuOnlyPolicy())
