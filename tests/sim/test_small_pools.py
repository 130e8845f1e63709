"""Pools of hardly any pages: both of them full, an abort whose pages somebody else waits for, and
answers about requests that nobody knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dualpace.core.messages import (
    CPU,
    GPU,
    AnyMessage,
    Cancel,
    Deny,
    Gone,
    Grant,
    Handoff,
    KeepRow,
    Loaded,
    Recall,
    Release,
    Return,
)
from dualpace.core.plan import Batch, CopyJob, CopyKind
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.chunks import prefill_budget, prefill_chunks
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView
from dualpace.scheduler.rows import Phase
from dualpace.sim.executor import next_token
from dualpace.sim.world import Hardware, World

PAGE_TOKENS = 4


def request(name: str, arrival: int, prompt: int, output: int) -> RequestState:
    tokens = [100 * arrival + i for i in range(prompt)]
    return RequestState(name, arrival, 0, tokens, [], DecodeParams(max_tokens=output))


def expected(state: RequestState) -> list[int]:
    tokens = list(state.prompt)
    for _ in range(state.params.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(state.prompt) :]


def hardware(gpu_pages: int, host_pages: int, **more: Any) -> Hardware:
    return Hardware(
        **{
            "gpu_pages": gpu_pages,
            "host_pages": host_pages,
            "gpu_step": lambda batch: 0.01,
            "cpu_step": lambda batch: 0.02,
            "copy": lambda job: 0.03,
            "delay": lambda sender, to: 0.001,
            "page_tokens": PAGE_TOKENS,
            **more,
        }
    )


@pytest.mark.parametrize("host_pages", [0, 1, 8])
@pytest.mark.parametrize("seed", range(5))
def test_full_pools_hold_up_nobody_for_ever(host_pages: int, seed: int) -> None:
    rng = random.Random(seed)
    least = {"gpu": 8, "host": host_pages}

    def noting(batch: Batch) -> float:
        least["gpu"] = min(least["gpu"], world.gpu_scheduler.pool.free)
        if world.cpu_scheduler.pool.total:
            least["host"] = min(least["host"], world.cpu_scheduler.pool.free)
        return rng.uniform(0.0, 0.02)

    chosen = hardware(8, host_pages, gpu_step=noting, cpu_step=noting)
    world = World(chosen, DualPacePolicy(64), max_tokens=8)
    states = [
        request(f"r{i}", i, prompt, rng.randint(1, 32 - prompt))
        for i, prompt in enumerate(rng.choices([1, 2, 3, 20, 28], k=40))
    ]
    for state in states:
        world.submit(rng.uniform(0.0, 1.0), state)
    world.tick(120)
    world.run(until=120)
    for state in states:
        assert world.streams[state.id].received == expected(state), state.id
    assert least == {"gpu": 0, "host": 0}
    assert (world.gpu_scheduler.moves["handed_off"] > 0) == (host_pages > 0)
    world.check_integrity()


@pytest.mark.parametrize("max_rows", [1, 4])
def test_prompts_that_only_the_host_could_hold_keep_nobody_from_a_free_seat(max_rows: int) -> None:
    """More of them than a policy sees of the queue, and the host is full."""
    chosen = hardware(8, 20, cpu_step=lambda batch: 0.2)
    world = World(chosen, DualPacePolicy(max_rows), max_rows=max_rows, max_tokens=32)
    large = [request(f"large{i}", i, 60, 20) for i in range(max_rows + 3)]
    small = request("small", 99, 3, 10)
    for state in large:
        world.submit(0.0, state)
    world.submit(0.5, small)
    world.tick(60)
    world.run(until=60)
    for state in (*large, small):
        assert world.streams[state.id].received == expected(state), state.id
    served = sorted((*large, small), key=lambda state: world.streams[state.id].tokens[0][1])
    assert served.index(small) == 1
    assert {engine for _, _, engine in world.streams["small"].tokens.values()} == {"gpu"}
    world.check_integrity()


class Sending:
    """Prefills some requests for the host, the others on the GPU, and moves "a" to and fro."""

    uses_host = True

    def __init__(self, to_host: set[str], leaves_at: Sequence[int] = (22,)) -> None:
        self.to_host = to_host
        self.leaves_at = leaves_at  # tokens with which "a" moves to the host

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        there = tuple(row.id for row in view.waiting if row.id in self.to_host)
        seated = tuple(row.id for row in view.waiting if row.id not in self.to_host)
        return GpuDecision(
            admit=seated,
            reserve=there if view.host_open else (),
            demote=tuple(
                row.id
                for row in view.decoding
                if row.id == "a" and row.tokens in self.leaves_at and view.host_open
            ),
            promote=tuple(row.id for row in view.host if row.id == "a" and row.tokens == 24),
            prefill=prefill_chunks(
                (*view.prefilling, *(row for row in view.waiting if row.id in seated)),
                prefill_budget(view, len(view.decoding)),
                view.page_tokens,
            ),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        return CpuDecision(run=tuple(row.id for row in view.rows))


NOTHING_YET = (Phase.RESERVING, Phase.REMOTE, Phase.RECALLING, Phase.LOADING)


@pytest.mark.parametrize("slow", [0.2, 1.0])
@pytest.mark.parametrize(
    ("stage", "tier"),
    [
        (Phase.PREFILL, "gpu"), (Phase.DECODE, "gpu"), (Phase.DEMOTING, "gpu"),
        (Phase.STORING, "gpu"), (Phase.RESERVING, "host"), (Phase.PREFILL, "host"),
        (Phase.LANDING, "host"), (Phase.REMOTE, "host"), (Phase.RECALLING, "host"),
        (Phase.LOADING, "host"),
    ],
)  # fmt: skip
def test_pages_of_an_aborted_request_are_used_again_once_nothing_touches_them(
    stage: Phase, tier: str, slow: float
) -> None:
    """What touches its pages is slow, and two others, which are fast, need all of either pool."""
    used: dict[str, set[int]] = {}

    def seconds(batch: Batch) -> float:
        for row in batch.rows:
            used.setdefault(row.request_id, set()).update(row.pages)
        return 0.5 if any(row.request_id == "a" for row in batch.rows) else 0.05

    def copy_seconds(job: CopyJob) -> float:
        return slow if job.request_id == "a" else 0.01

    chosen = hardware(8, 9, gpu_step=seconds, cpu_step=seconds, copy=copy_seconds)
    to_host = {"a", "on host"} if tier == "host" else {"on host"}
    world = World(chosen, Sending(to_host), max_tokens=8)
    states = [request("a", 0, 20, 10), request("on gpu", 1, 28, 4), request("on host", 2, 28, 4)]

    def look() -> None:
        row = world.gpu_scheduler.rows.get("a")
        if row is not None and row.phase is stage and (row.computed or stage in NOTHING_YET):
            for state in states[1:]:
                world.submit(world.clock.now, state)
            world.abort(world.clock.now, "a")
            return
        assert world.clock.now < 30, f"never {stage}"
        world.clock.at(world.clock.now + 0.0005, look)

    world.submit(0.0, states[0])
    world.clock.at(0.0, look)
    world.tick(60)
    world.run(until=60)
    assert world.streams["a"].aborted
    assert world.streams["a"].received == expected(states[0])[: len(world.streams["a"].received)]
    for state in states[1:]:
        assert world.streams[state.id].received == expected(state)
        assert len(used[state.id]) == 8
    world.check_integrity()


@pytest.mark.parametrize("trouble", ["crash while asking", "crash in a store", "failed store"])
@pytest.mark.parametrize("later", [23, 30])
def test_a_demotion_that_came_to_nothing_leaves_no_host_pages_for_the_next_one(
    trouble: str, later: int, first_copy_fails: Callable[[CopyKind], type[World]]
) -> None:
    """By then they are somebody else's."""
    chosen = hardware(16, 40, gpu_step=lambda batch: 0.4, copy=lambda job: 0.15, restart=0.0)
    kind = first_copy_fails("store") if trouble == "failed store" else World
    world = kind(chosen, Sending({"other"}, (21, later)), max_tokens=32)
    states = [request("a", 0, 20, 30), request("other", 1, 24, 40)]
    submitted: list[float] = []

    def look() -> None:
        row = world.gpu_scheduler.rows["a"]
        granted = row.phase is Phase.DEMOTING and row.host_pages
        if (trouble == "crash while asking" and granted) or row.phase is Phase.STORING:
            if trouble != "failed store":
                world.crash_cpu(world.clock.now)
            world.submit(world.clock.now + 0.2, states[1])
            submitted.append(world.clock.now)
            return
        world.clock.at(world.clock.now + 0.0005, look)

    world.submit(0.0, states[0])
    world.clock.at(0.01, look)
    world.tick(60)
    world.run(until=60)
    assert submitted
    for state in states:
        assert world.streams[state.id].received == expected(state), state.id
    world.check_integrity()


@pytest.mark.parametrize("again", [1, 3])
def test_what_is_said_of_unknown_requests_changes_nothing(again: int) -> None:
    nobody, gone = request("nobody", 99, 5, 5), Gone("nobody", 7)
    to_cpu = [
        Cancel("nobody", 1), Handoff(nobody), Recall("nobody", 1, 64), Loaded("nobody", 1), gone,
    ]  # fmt: skip
    to_gpu = [
        Grant("nobody", 1, [0, 1]), Deny("nobody", 1), Release(nobody, [0, 1]),
        KeepRow("nobody", 1, 8), KeepRow("nobody", 1, 0), Return(nobody), gone,
    ]  # fmt: skip
    world = World(hardware(12, 30), DualPacePolicy(64), max_rows=4, max_tokens=16)
    states = [request(f"r{i}", i, 1 + i, 20) for i in range(20)]
    for state in states:
        world.submit(0.05 * state.arrival, state)

    def say(sender: str, to: str, bodies: list[AnyMessage]) -> None:
        for body in bodies * again:
            world.network.send(sender, to, body)

    for time in (0.0, 0.5, 1.0, 5.0):
        world.clock.at(time, lambda: say(GPU, CPU, to_cpu))
        world.clock.at(time, lambda: say(CPU, GPU, to_gpu))
    world.run()
    for state in states:
        assert world.streams[state.id].received == expected(state)
    assert "nobody" not in world.streams
    assert world.gpu_scheduler.moves["dropped"] >= 4 * again * 5
    world.check_integrity()
