"""What should not happen, in virtual time: messages lost, doubled, late; copies without an end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dualpace.core import messages
from dualpace.core.messages import CPU, GPU, AnyMessage, HostGone
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.sim.executor import next_token
from dualpace.sim.world import Hardware, World

PAGE_TOKENS = 4
Fate = Callable[[str, str, AnyMessage], Sequence[float]]
BETWEEN_ENGINES = [
    "Reserve", "Cancel", "Handoff", "Recall", "Loaded", "Usable", "Gone",
    "Grant", "Deny", "Release", "KeepRow", "Return", "HostReport",
]  # fmt: skip


def hardware(rng: random.Random, fate: Fate, **more: Any) -> Hardware:
    def between_engines(sender: str, to: str, body: AnyMessage) -> Sequence[float]:
        return fate(sender, to, body) if {sender, to} == {GPU, CPU} else (0.0,)

    return replace(
        Hardware(
            gpu_pages=16,
            host_pages=40,
            gpu_step=lambda batch: rng.uniform(0.0, 0.02),
            cpu_step=lambda batch: rng.uniform(0.0, 0.05),
            copy=lambda job: rng.uniform(0.0, 0.05),
            delay=lambda sender, to: rng.uniform(0.0, 0.02),
            page_tokens=PAGE_TOKENS,
            fate=between_engines,
        ),
        **more,
    )


def requests(rng: random.Random, count: int = 40) -> list[RequestState]:
    states = []
    for arrival in range(count):
        length = rng.randint(1, 40)
        prompt = [rng.randrange(50_000) for _ in range(length)]
        params = DecodeParams(max_tokens=rng.randint(1, 50), logprobs=1 if arrival % 2 else None)
        states.append(RequestState(f"r{arrival}", arrival, 0, prompt, [], params))
    return states


def submit_all(
    world: World, rng: random.Random, seed: int, *, last_crash: float
) -> list[RequestState]:
    """Requests, with aborts for odd seeds, and a crash by `last_crash` for every other two."""
    states = requests(rng)
    for state in states:
        at = rng.uniform(0, 2.0)
        world.submit(at, state)
        if seed % 2 and rng.random() < 0.5:
            world.abort(at + rng.expovariate(1.0), state.id)
    if seed % 4 >= 2:
        world.crash_cpu(rng.uniform(0, last_crash))
    return states


def expected(state: RequestState) -> list[int]:
    tokens = list(state.prompt)
    for _ in range(state.params.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(state.prompt) :]


def check(world: World, states: list[RequestState]) -> None:
    for state in states:
        stream = world.streams[state.id]
        assert stream.failed is None
        if stream.aborted:
            assert stream.received == expected(state)[: len(stream.received)]
        else:
            assert stream.received == expected(state), state.id
            assert stream.complete
    world.check_integrity()


@pytest.mark.parametrize("seed", range(40))
def test_messages_that_come_twice_or_much_later_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    often = rng.choice([0.1, 0.5, 1.0])
    much = rng.choice([0.1, 1.0, 5.0])

    def fate(sender: str, to: str, body: AnyMessage) -> Sequence[float]:
        return (0.0, rng.uniform(0.0, much)) if rng.random() < often else (0.0,)

    world = World(hardware(rng, fate), DualPacePolicy(64), max_rows=rng.choice([2, 8, 64]))
    states = submit_all(world, rng, seed, last_crash=4.0)
    world.tick(200)
    world.run(until=200)
    check(world, states)


@pytest.mark.parametrize("seed", range(40))
def test_messages_that_are_lost_cost_time_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    often = rng.choice([0.01, 0.05, 0.2])
    doubled = rng.choice([0.0, 0.2])

    def fate(sender: str, to: str, body: AnyMessage) -> Sequence[float]:
        if world.clock.now < 60 and rng.random() < often:
            return ()
        return (0.0, rng.uniform(0.0, 20.0)) if rng.random() < doubled else (0.0,)

    world = World(hardware(rng, fate), DualPacePolicy(64), max_rows=rng.choice([2, 8, 64]))
    states = submit_all(world, rng, seed, last_crash=30.0)
    world.tick(2000)
    world.run(until=2000)
    check(world, states)


@pytest.mark.parametrize("kind", BETWEEN_ENGINES)
def test_the_loss_of_any_kind_of_message_is_made_good(kind: str) -> None:
    """Every second one of the kind is lost for a minute."""
    rng = random.Random(kind)
    seen: Counter[str] = Counter()

    def fate(sender: str, to: str, body: AnyMessage) -> Sequence[float]:
        seen[type(body).__name__] += 1
        lost = type(body).__name__ == kind and seen[kind] % 2 and world.clock.now < 60
        return () if lost else (0.0,)

    assert getattr(messages, kind)
    world = World(hardware(rng, fate), DualPacePolicy(64), max_rows=8)
    states = requests(rng)
    for state in states:
        at = rng.uniform(0, 10.0)
        world.submit(at, state)
        if rng.random() < 0.3:
            world.abort(at + rng.expovariate(1.0), state.id)
    world.tick(1000)
    world.run(until=1000)
    check(world, states)


def test_without_a_host_those_that_only_it_could_hold_fail_and_hold_up_nobody() -> None:
    """More of them than a policy sees of the queue; they wait as long as there may be a host."""
    rng = random.Random(0)
    world = World(hardware(rng, lambda *_: (0.0,), restart=1e9), DualPacePolicy(64), max_rows=4)
    world.crash_cpu(0.5)
    large = [
        RequestState(f"large{i}", i, 0, [i] * 70, [], DecodeParams(max_tokens=9)) for i in range(8)
    ]
    grows = RequestState("grows", 9, 0, [9] * 50, [], DecodeParams(max_tokens=60))
    small = [
        RequestState(f"small{i}", 10 + i, 0, [i] * 9, [], DecodeParams(max_tokens=20))
        for i in range(10)
    ]
    for state in [*large, grows, *small]:
        world.submit(1.0, state)
    world.tick(60)
    world.run(until=20)
    assert all(world.streams[state.id].complete for state in small)
    assert not any(world.streams[state.id].received for state in large)
    world.port.send(GPU, HostGone())
    late = RequestState("late", 99, 0, [7] * 70, [], DecodeParams(max_tokens=9))
    world.submit(30, late)
    world.run(until=60)
    for state in [*large, grows, late]:
        failed = world.streams[state.id].failed
        assert failed is not None
        assert "the GPU has 64" in failed
    world.gpu_scheduler.pool.check_integrity(idle=True)


@pytest.mark.parametrize("owed", ["Grant", "Release"])
def test_a_cpu_engine_that_falls_silent_stops_no_row_of_the_gpu_for_long(owed: str) -> None:
    """Neither one that is to make room and gets no host pages, nor one for which room is kept and
    that does not come."""

    def fate(sender: str, to: str, body: AnyMessage) -> Sequence[float]:
        return () if sender == CPU and world.clock.now > 0.47 else (0.0,)

    steps = {"gpu_step": lambda batch: 0.02, "cpu_step": lambda batch: 0.05}
    delays = {"copy": lambda job: 0.01, "delay": lambda sender, to: 0.001}
    pages = {"Grant": 16, "Release": 20}[owed]
    rng = random.Random(0)
    world = World(
        hardware(rng, fate, gpu_pages=pages, **steps, **delays), DualPacePolicy(64), max_rows=8
    )
    # Two that share the GPU until one is in the way, or the first of three makes room for the last.
    sizes = {"Grant": [(10, 50), (10, 50)], "Release": [(12, 20), (10, 45), (36, 100)]}[owed]
    states = [
        RequestState(f"r{i}", i, 0, [i] * length, [], DecodeParams(max_tokens=count))
        for i, (length, count) in enumerate(sizes)
    ]
    for state in states:
        world.submit(0.1 + 0.05 * state.arrival, state)
    world.tick(60)
    world.run(until=60)
    assert world.gpu_scheduler.moves["unanswered"] == len(states) - 1
    for state in states[:2]:
        times = sorted(time for _, time, _ in world.streams[state.id].tokens.values())
        assert world.streams[state.id].received == expected(state)
        assert max(after - before for before, after in pairwise(times)) < 5.0


@pytest.mark.parametrize("kind", ["load", "store", "land"])
def test_a_copy_that_never_ends_keeps_its_pages_and_holds_up_nobody_else(kind: str) -> None:
    """The supervisor sees the same thing under way for ever, and no new CPU engine is let in."""
    rng = random.Random(kind)
    stuck: list[str] = []

    def copy(job: Any) -> float:
        if job.kind == kind and len(job.source or [0]) and not stuck:
            stuck.append(job.request_id)
            return float("inf")
        return rng.uniform(0.0, 0.05)

    chosen = hardware(rng, lambda *_: (0.0,), copy=copy, gpu_pages=32)
    world = World(chosen, DualPacePolicy(64), max_rows=8)
    beats: list[int] = []
    world.gpu.loop.beat = beats.append
    states = requests(rng)
    for state in states:
        world.submit(rng.uniform(0, 2.0), state)
    world.tick(300)
    world.run(until=200)
    assert stuck
    for state in states:
        assert world.streams[state.id].complete or state.id in stuck
    pools = [world.gpu_scheduler.pool, world.cpu_scheduler.pool]
    assert sum(pool.total - pool.free for pool in pools) > 0
    assert beats[-1] == beats[-100] != 0
    world.crash_cpu(250)
    world.run(until=300)
    assert not world.cpu.alive
    assert world.network.generation == 1
