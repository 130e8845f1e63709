"""Any schedule: hypothesis decides what is delivered, completed, lost, doubled or aborted next.

The whole simulated server, in which nothing happens by itself: each message, step and copy under
way waits in a lane until a rule lets it end. After each, who holds which page is checked against
everything that is under way; at the end every request has its tokens and every page is back.

With DUALPACE_SOAK_SECONDS the schedules are new ones in each run, longer, and many more.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dualpace.core.messages import (
    FRONTEND,
    AnyMessage,
    EngineName,
    GpuLoad,
    HostReport,
    Usable,
)  # fmt: skip
from dualpace.core.plan import Batch, CopyJob, Executor
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.kv.pages import PagePool, pages_for
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView
from dualpace.scheduler.rows import Phase
from dualpace.sim.clock import VirtualClock
from dualpace.sim.executor import SimulatedMemory, next_token
from dualpace.sim.world import Hardware, World

PAGE_TOKENS = 4
MOST_REQUESTS = 6
MOST_TOKENS = 28
REMEMBERED = 24  # messages that may come again
PATIENCE = 400  # seconds within which everything that was lost is made good
QUIET = 60  # seconds within which the engines agree again, once all requests have ended
WHICH = st.integers(0, 11)  # of what there is, in turn
ENDINGS = 8  # of things under way, between two rules
ORDER = st.integers(0, 2**24)  # of them
PROMPT, OUTPUT = st.integers(1, MOST_TOKENS - 1), st.integers(1, MOST_TOKENS)
ON_THE_MOVE = (
    Phase.RESERVING, Phase.LANDING, Phase.DEMOTING, Phase.STORING, Phase.REMOTE, Phase.RECALLING,
    Phase.LOADING,
)  # fmt: skip

SOAK = "DUALPACE_SOAK_SECONDS" in os.environ
SETTINGS = settings(
    max_examples=4000 if SOAK else 600,
    stateful_step_count=120 if SOAK else 60,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

WITH_HOST_PAGES = (Phase.LANDING, Phase.DEMOTING, Phase.STORING, Phase.LOADING)
REPORTS = (HostReport, Usable, GpuLoad)  # which own nothing

Lane = tuple[str, ...]


class Restless(DualPacePolicy):
    """Sends a row to the host at every third token and asks it back one token later, so that each
    moves as often as it can and still gets on. A row that the host has no page for is sent back:
    nobody else would promote it."""

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        decision = super().plan_gpu(view)
        leaving = {*decision.demote, *decision.preempt}
        demote = [
            row.id
            for row in view.decoding
            if view.host_open
            and row.id not in leaving
            and row.tokens % 3 == 0
            and pages_for(row.tokens + 1, PAGE_TOKENS) <= view.host_pages_total
        ]
        return msgspec.structs.replace(
            decision,
            demote=(*decision.demote, *demote),
            promote=tuple(row.id for row in view.host if row.tokens % 3 == 1),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        decision = super().plan_cpu(view)
        stuck = [
            row.id
            for row in view.rows
            if row.id in decision.run and row.computed + 1 > row.pages * PAGE_TOKENS
        ]
        if len(view.rows) > 1 or len(stuck) <= view.pages_free:
            return decision
        return msgspec.structs.replace(decision, run=(), send_back=tuple(stuck))


class Lanes(VirtualClock):
    """Things under way end when they are told to, those of one lane in their order; whatever is in
    no lane happens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[Lane, deque[Callable[[], None]]] = {}
        self.held: set[Lane] = set()
        self.repeatable: set[Callable[[], None]] = set()
        self.delivered: deque[Callable[[], None]] = deque(maxlen=REMEMBERED)  # of those; last first
        self._lane: Lane | None = None

    @contextmanager
    def into(self, *lane: str) -> Iterator[None]:
        """What is scheduled meanwhile goes into that lane."""
        self._lane, before = lane, self._lane
        yield
        self._lane = before

    def at(self, time: float, event: Callable[[], None]) -> None:
        if self._lane is None:
            super().at(time, event)
        else:
            self.lanes.setdefault(self._lane, deque()).append(event)

    def busy(self, *kinds: str) -> list[Lane]:
        """Lanes in which something waits and may end: of these kinds, or all."""
        return sorted(
            lane
            for lane, events in self.lanes.items()
            if events and lane not in self.held and (lane[0] in kinds or not kinds)
        )

    def end_next(self, lane: Lane) -> None:
        """Let the oldest thing in the lane end, and all that follows from it at once."""
        event = self.lanes[lane].popleft()
        if event in self.repeatable:
            self.delivered.appendleft(event)
        event()
        self.run()


class HeldExecutor:
    """A simulated executor whose steps and copies go into lanes; knows what is under way."""

    def __init__(self, name: str, simulated: Executor, lanes: Lanes) -> None:
        self.name = name
        self.steps: list[tuple[Batch, Any]] = []
        self.copies: list[tuple[CopyJob, Any]] = []
        self._simulated = simulated
        self._lanes = lanes
        self.close = simulated.close

    def launch(self, batch: Batch) -> Any:
        with self._lanes.into(f"{self.name} step"):
            ticket = self._simulated.launch(batch)
        self.steps = [*(each for each in self.steps if not each[1].done()), (batch, ticket)]
        return ticket

    def copy(self, job: CopyJob) -> Any:
        with self._lanes.into("copy", str(job.number)):
            ticket = self._simulated.copy(job)
        self.copies = [*(each for each in self.copies if not each[1].done()), (job, ticket)]
        return ticket

    def under_way(self, memory: SimulatedMemory) -> Iterator[tuple[str, str, Iterable[int]]]:
        """(request, tier, pages) of what steps and copies read or write now."""
        for batch, ticket in self.steps:
            if not ticket.done():
                yield from ((row.request_id, row.tier, row.pages) for row in batch.rows)
        for job, ticket in self.copies:
            if ticket.done():
                continue
            if job.kind == "land":
                landing = memory.in_transit(job.request_id)
                yield job.request_id, "host", {page for page, _ in landing}
                continue
            loads = job.kind == "load"
            yield job.request_id, "host", job.source if loads else job.target
            yield job.request_id, "gpu", job.target if loads else job.source


class HeldWorld(World):
    """The simulated server, in whose lanes everything waits."""

    clock: Lanes

    def __init__(self, *args: Any, **options: Any) -> None:
        self.held: dict[str, HeldExecutor] = {}
        super().__init__(*args, clock=Lanes(), **options)
        send = self.network.send

        def held_send(sender: str, to: str, body: AnyMessage) -> None:
            kind = "message" if FRONTEND in (sender, to) else "between engines"
            with self.clock.into(kind, sender, to):
                send(sender, to, body)
            if FRONTEND not in (sender, to) and not isinstance(body, REPORTS):
                self.clock.repeatable.add(self.clock.lanes[kind, sender, to][-1])

        self.network.send = held_send  # type: ignore[method-assign]
        self.clock.run()

    def make_executor(self, name: EngineName, wake: Callable[[], None]) -> Executor:
        self.held[name] = HeldExecutor(name, super().make_executor(name, wake), self.clock)
        return self.held[name]


class Schedules(RuleBasedStateMachine):
    """Requests that two small pools cannot hold at once, served in some order."""

    @initialize(
        gpu_pages=st.sampled_from([8, 5, 0]),
        host_pages=st.sampled_from([14, 11, 8, 1, 0]),
        max_rows=st.sampled_from([1, 2, 8]),
        chunk=st.sampled_from([4, 64]),
        gpu_depth=st.sampled_from([1, 2]),
        requests=st.lists(st.tuples(PROMPT, OUTPUT), min_size=2, max_size=4),
    )
    def start(
        self,
        gpu_pages: int,
        host_pages: int,
        max_rows: int,
        chunk: int,
        gpu_depth: int,
        requests: list[tuple[int, int]],
    ) -> None:
        if max(gpu_pages, host_pages) < 8:
            gpu_pages = 8  # some tier can hold every request
        hardware = Hardware(
            gpu_pages=gpu_pages,
            host_pages=host_pages,
            gpu_step=lambda batch: 0.0,
            cpu_step=lambda batch: 0.0,
            copy=lambda job: 0.0,
            delay=lambda sender, to: 0.0,
            page_tokens=PAGE_TOKENS,
            restart=0.0,
        )
        self.world = HeldWorld(
            hardware, Restless(64), max_rows=max_rows, max_tokens=chunk, gpu_depth=gpu_depth
        )
        self.clock = self.world.clock
        while lanes := self.clock.busy():  # each engine knows of the other
            self.clock.end_next(lanes[0])
        for prompt, output in requests:
            self.send_request(prompt, output)

    def teardown(self) -> None:
        """Whatever is under way ends, time passes, and all is well."""
        if not hasattr(self, "world"):
            return
        self.settle()
        for request_id, stream in self.world.streams.items():
            assert stream.failed is None
            assert stream.received == expected(stream.state)[: len(stream.received)]
            assert stream.complete or stream.aborted, request_id
        self.world.check_integrity()

    def settle(self) -> None:
        self.clock.held.clear()
        for _ in range(PATIENCE):
            streams = self.world.streams.values()
            done = all(stream.complete or stream.aborted for stream in streams)
            for _ in range(QUIET if done else 1):
                self.tick()
                while lanes := self.clock.busy():
                    self.clock.end_next(lanes[0])
            if done:
                return

    def tick(self) -> None:
        self.clock.now += 1.0
        self.world.gpu.turn()
        self.world.cpu.turn()
        self.clock.run()

    # -- what may happen -------------------------------------------------------------------------

    @rule(prompt=PROMPT, output=OUTPUT, order=ORDER)
    def submit(self, prompt: int, output: int, order: int) -> None:
        if len(self.world.streams) < MOST_REQUESTS:
            self.send_request(prompt, output)
        self.go_on(order)

    @rule(which=WHICH, order=ORDER)
    def abort(self, which: int, order: int) -> None:
        self.abort_one_of(sorted(self.world.streams), which)
        self.go_on(order)

    @rule(which=WHICH, order=ORDER)
    def abort_on_the_move(self, which: int, order: int) -> None:
        rows = self.world.gpu_scheduler.rows.values()
        self.abort_one_of([row.id for row in rows if row.phase in ON_THE_MOVE], which)
        self.go_on(order)

    @rule(order=ORDER)
    def go_on(self, order: int) -> None:
        self.end_some(order)

    @rule(order=ORDER)
    def go_on_without_copies(self, order: int) -> None:
        self.end_some(order, "message", "between engines", "gpu step", "cpu step")

    @rule(which=WHICH, order=ORDER)
    def hold_up(self, which: int, order: int) -> None:
        """A copy that takes long, a slow engine, or a message that is late and all after it."""
        lanes = self.clock.busy("copy", "between engines", "cpu step", "gpu step")
        if which < len(lanes):
            self.clock.held.add(lanes[which])
        self.go_on(order)

    @rule()
    def let_go(self) -> None:
        self.clock.held.clear()

    @rule(which=st.integers(0, REMEMBERED - 1), order=ORDER)
    def again(self, which: int, order: int) -> None:
        """A message that has come between the engines, lately or long ago, comes once more."""
        if which < len(self.clock.delivered):
            self.clock.delivered[which]()
            self.clock.run()
        self.go_on(order)

    @rule(which=WHICH, order=ORDER)
    def lose(self, which: int, order: int) -> None:
        lanes = self.clock.busy("between engines")
        if which < len(lanes):
            self.clock.lanes[lanes[which]].popleft()
        self.go_on(order)

    @rule(seconds=st.sampled_from([1, 2, 12, 30]))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    @rule(sure=st.integers(0, 4), order=ORDER)
    def crash(self, sure: int, order: int) -> None:
        if sure == 4:
            self.world.crash_cpu(0.0)
            self.clock.run()
        self.go_on(order)

    def send_request(self, prompt: int, output: int) -> None:
        number = len(self.world.streams)
        params = DecodeParams(max_tokens=min(output, MOST_TOKENS - prompt))
        tokens = [100 * number + i for i in range(prompt)]
        self.world.submit(0.0, RequestState(f"r{number}", number, 0, tokens, [], params))
        self.clock.run()

    def abort_one_of(self, requests: Sequence[str], which: int) -> None:
        if which < len(requests):
            self.world.abort(0.0, requests[which])
            self.clock.run()

    def end_some(self, order: int, *kinds: str) -> None:
        """`order` says in which lane each time: its digits, in base of how many there are."""
        for _ in range(ENDINGS):
            lanes = self.clock.busy(*kinds)
            if not lanes:
                return
            order, which = divmod(order, len(lanes))
            self.clock.end_next(lanes[which])
            self.check()

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        """Nobody has a page of somebody else's, and what is under way has the pages it names."""
        world = self.world
        world.gpu_scheduler.pool.check_integrity()
        world.gpu_scheduler.ledger.check_integrity()
        for row in world.gpu_scheduler.rows.values():
            on_host = row.phase in WITH_HOST_PAGES or row.tier == "host"
            assert on_host or not row.host_pages, f"{row.id} has host pages and {row.phase}"
        tables = {"gpu": gpu_tables(world), "host": []}
        pools = {"gpu": world.gpu_scheduler.pool}
        if world.cpu.alive:
            world.cpu_scheduler.pool.check_integrity()
            tables["host"] = host_tables(world)
            pools["host"] = world.cpu_scheduler.pool
        owner: dict[tuple[str, int], str] = {}
        for tier, held in tables.items():
            for request_id, pages in held:
                for page in pages:
                    assert (tier, page) not in owner, f"{tier} page {page} is in two tables"
                    owner[tier, page] = request_id
        for engine in (world.gpu, world.cpu):
            if not engine.alive:
                continue
            for request_id, tier, pages in world.held[engine.port.name].under_way(world.memory):
                for page in pages if tier in pools else ():
                    who = owner.setdefault((tier, page), request_id)
                    assert who == request_id, f"{tier} page {page} of {request_id} is now {who}'s"
                    assert not is_free(pools[tier], page), f"{tier} page {page} of {request_id}"


def gpu_tables(world: World) -> list[tuple[str, list[int]]]:
    rows = world.gpu_scheduler.rows.values()
    return [(row.id, row.table.pages) for row in rows if row.table is not None]


def host_tables(world: World) -> list[tuple[str, list[int]]]:
    scheduler = world.cpu_scheduler
    claims = [*scheduler.grants.items(), *scheduler.loads.items()]
    return [
        *((name, row.table.pages) for name, row in scheduler.rows.items()),
        *((name, claim.table.pages) for name, claim in claims),
    ]


def is_free(pool: PagePool, page: int) -> bool:
    return bool(pool._is_free[page])


def expected(state: RequestState) -> list[int]:
    tokens = list(state.prompt)
    for _ in range(state.params.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(state.prompt) :]


TestSchedules = Schedules.TestCase
TestSchedules.settings = SETTINGS
