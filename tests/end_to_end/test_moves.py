"""KV moves between the tiers over real bytes: every position is where it should be, unchanged.

Both real executors compute, copy and share an arena in their own threads; when a step or copy is
launched and when its end is told lies in virtual time, so that a seed gives the same schedule
again. Pools are small, requests are moved for no reason at all, copies begin late, messages come
twice or not at all, the CPU engine dies, and requests are aborted wherever they stand.

With DUALPACE_SOAK_SECONDS rounds follow each other for so long on each executor, from the seed
DUALPACE_SOAK_SEED on; `make soak` sets both. A round that fails names its seed, which replays it.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from dualpace.core.messages import CPU, FRONTEND, GPU, AnyMessage, EngineName
from dualpace.core.plan import Batch, BatchRow, CopyJob, StepResult, Tier
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.kv.pages import pages_for
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.view import CpuDecision, CpuView, GpuDecision, GpuView, RowView
from dualpace.scheduler.base import ANY_EPOCH
from dualpace.scheduler.rows import Phase
from dualpace.sim.clock import VirtualClock
from dualpace.sim.executor import SimulatedTicket
from dualpace.sim.world import Hardware, World

PAGE_TOKENS = 16
CHUNK = 24  # tokens of a step: a prompt takes several
LAST_LOSS = 20.0  # seconds after which no message is lost any more
END = 1500  # seconds by which whatever was lost has been made good
ROUNDS = {"stand-in": 20, "torch": 7}  # where no time is given

STAGE_OF_PHASE = {
    Phase.WAITING: "queued",
    Phase.RESERVING: "asking for host pages",
    Phase.LANDING: "landing",
    Phase.DECODE: "decoding",
    Phase.DEMOTING: "asking to be demoted",
    Phase.STORING: "store in flight",
    Phase.RECALLING: "asked back",
    Phase.LOADING: "load in flight",
}
STAGES = [
    *STAGE_OF_PHASE.values(),
    *("first chunk", "later chunk", "handoff sent", "with the CPU engine", "CPU iteration"),
]


class Restless(DualPacePolicy):
    """Moves requests to and fro for no reason, every few tokens, beside what there is a reason for.

    On the host a request lingers where it is to be promoted, so that there will be room.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_host_rows=64)
        self.rng = rng

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        decision = super().plan_gpu(view)
        leaving = {*decision.demote, *decision.preempt}
        demote = [
            row.id
            for row in view.decoding
            if view.host_open
            and row.id not in leaving
            and row.tokens % 8 in (4, 5)
            and self.rng.random() < 0.4
            and pages_for(row.tokens + 1, PAGE_TOKENS) <= view.host_pages_total
        ]
        promote = [
            row.id
            for row in view.host
            if row.id not in decision.promote and _lingers(row) and self.rng.random() < 0.5
        ]
        return msgspec.structs.replace(
            decision,
            demote=(*decision.demote, *demote),
            promote=(*decision.promote, *promote),
        )

    def plan_cpu(self, view: CpuView) -> CpuDecision:
        decision = super().plan_cpu(view)
        lingering = {row.id for row in view.rows if _lingers(row) and self.rng.random() < 0.97}
        run = tuple(request_id for request_id in decision.run if request_id not in lingering)
        return msgspec.structs.replace(decision, run=run or decision.run[:1])


def _lingers(row: RowView) -> bool:
    return row.tokens % 8 in (0, 1)


class Move(NamedTuple):
    """A copy under way: which slots of its pages hold KV of the request, and their checksums."""

    job: CopyJob
    owned: NDArray[np.bool_]  # [pages, page_tokens]
    sums: NDArray[np.uint64]


class Written:
    """Who wrote which position last into each slot of either pool, and a checksum of its bytes."""

    def __init__(self, engines: Any) -> None:
        tiers: tuple[Tier, ...] = ("gpu", "host")
        self.words: dict[Tier, Any] = {tier: engines.kv_words(tier) for tier in tiers}
        slots = {tier: (len(words), PAGE_TOKENS) for tier, words in self.words.items()}
        self.owner = {tier: np.full(slots[tier], -1, np.int64) for tier in tiers}
        self.position = {tier: np.full(slots[tier], -1, np.int64) for tier in tiers}
        self.sums = {tier: np.zeros(slots[tier], np.uint64) for tier in tiers}
        self.numbers: dict[str, int] = {}
        # Odd factors: no change of a single word leaves the sum as it was.
        size = self.words["gpu"][0, ..., 0, :].size
        self.factors = np.random.default_rng(0).integers(2**63, size=size, dtype=np.uint64) * 2 + 1
        self.checked = 0
        self.moves: Counter[str] = Counter()  # copies of pages, by request

    def step_starts(self, batch: Batch) -> None:
        for row in batch.rows:
            self.owner[row.tier][self._slots(row, row.start, row.end)] = -1

    def step_ended(self, batch: Batch) -> None:
        """Its context is still what was written, and what it has written is noted."""
        for row in batch.rows:
            number = self._number(row.request_id)
            sums = self._checksums(row.tier, row.pages).reshape(-1)
            context = self._slots(row, 0, row.start)
            assert (self.owner[row.tier][context] == number).all(), f"{row.request_id}: not its KV"
            assert (self.position[row.tier][context] == np.arange(row.start)).all()
            assert (self.sums[row.tier][context] == sums[: row.start]).all(), "KV has changed"
            self.checked += row.start
            new = self._slots(row, row.start, row.end)
            self.owner[row.tier][new] = number
            self.position[row.tier][new] = np.arange(row.start, row.end)
            self.sums[row.tier][new] = sums[row.start : row.end]

    def copy_starts(self, job: CopyJob) -> Move:
        source, target = _tiers(job)
        places = np.arange(len(job.source) * PAGE_TOKENS).reshape(-1, PAGE_TOKENS)
        owned = self.owner[source][job.source] == self._number(job.request_id)
        owned &= self.position[source][job.source] == places
        # The last page is filled as far as the next step will tell.
        assert owned[:-1].all(), f"not its KV: {job}"
        assert owned[-1:, 0].all(), f"not its KV: {job}"
        sums = self.sums[source][job.source]
        assert (self._checksums(source, job.source)[owned] == sums[owned]).all(), "before the copy"
        self.owner[target][job.target] = -1
        return Move(job, owned, sums)

    def copy_ended(self, move: Move) -> None:
        """The bytes have arrived, and those that they were made from are still there."""
        job, owned, sums = move
        source, target = _tiers(job)
        for tier, pages in ((source, job.source), (target, job.target)):
            assert (self._checksums(tier, pages)[owned] == sums[owned]).all(), f"{tier}: {job}"
        places = np.arange(owned.size).reshape(owned.shape)
        self.owner[target][job.target] = np.where(owned, self._number(job.request_id), -1)
        self.position[target][job.target] = np.where(owned, places, -1)
        self.sums[target][job.target] = sums
        self.checked += 2 * int(owned.sum())
        self.moves[job.request_id] += bool(job.source)

    def _checksums(self, tier: Tier, pages: Sequence[int]) -> NDArray[np.uint64]:
        """[pages, page_tokens]"""
        words = np.moveaxis(self.words[tier][pages], 4, 1)
        flat = words.reshape(len(pages), PAGE_TOKENS, len(self.factors)).astype(np.uint64)
        sums: NDArray[np.uint64] = (flat * self.factors).sum(axis=-1)
        return sums

    def _slots(self, row: BatchRow, start: int, end: int) -> tuple[Any, Any]:
        positions = np.arange(start, end)
        return np.array(row.pages)[positions // PAGE_TOKENS], positions % PAGE_TOKENS

    def _number(self, request_id: str) -> int:
        return self.numbers.setdefault(request_id, len(self.numbers))


def _tiers(job: CopyJob) -> tuple[Tier, Tier]:
    return ("host", "gpu") if job.kind == "load" else ("gpu", "host")


class PacedExecutor:
    """A real executor whose steps and copies end in virtual time; copies also begin late."""

    def __init__(
        self,
        real: Any,
        clock: VirtualClock,
        written: Written,
        step_time: Callable[[Batch], float],
        copy_time: Callable[[CopyJob], float],
        rng: random.Random,
        wake: Callable[[], None],
    ) -> None:
        self._real = real
        self._clock = clock
        self._written = written
        self._step_time = step_time
        self._copy_time = copy_time
        self._rng = rng
        self._wake = wake
        self._running: list[Future[Any]] = []
        self._free_at = 0.0
        self._closed = False

    def launch(self, batch: Batch) -> SimulatedTicket[StepResult]:
        ticket: SimulatedTicket[StepResult] = SimulatedTicket()
        self._written.step_starts(batch)
        step = self._real.launch(batch)
        self._running = [*(each for each in self._running if not each.done()), step]

        def ended() -> None:
            if not self._closed:
                outcome = step.result()
                self._written.step_ended(batch)
                ticket.finish(outcome)
                self._wake()

        self._free_at = max(self._free_at, self._clock.now) + self._step_time(batch)
        self._clock.at(self._free_at, ended)
        return ticket

    def copy(self, job: CopyJob) -> SimulatedTicket[None]:
        ticket: SimulatedTicket[None] = SimulatedTicket()
        move = self._written.copy_starts(job)
        copies: list[Future[None]] = []

        def ended() -> None:
            copies[0].result()
            self._written.copy_ended(move)
            ticket.finish(None)
            self._wake()

        seconds = self._copy_time(job)
        begins = self._clock.now + self._rng.uniform(0.0, seconds)
        self._clock.at(begins, lambda: copies.append(self._real.copy(job)))
        self._clock.at(self._clock.now + seconds, ended)
        return ticket

    def close(self) -> None:
        """As when its process is killed and reaped: nothing is written any more, or told."""
        self._closed = True
        wait(self._running)


class RealWorld(World):
    """The simulated server, on real executors and real KV."""

    def __init__(self, engines: Any, rng: random.Random, *args: Any, **options: Any) -> None:
        self.engines = engines
        self.rng = rng
        self.written = Written(engines)
        self.aborts: Counter[str] = Counter()
        super().__init__(*args, check_kv=False, **options)
        self.gpu_scheduler.on_end = self._noting_aborts(self.gpu_scheduler.on_end)

    def make_executor(self, name: EngineName, wake: Callable[[], None]) -> PacedExecutor:
        real, step = (
            (self.engines.gpu, self.hardware.gpu_step)
            if name == GPU
            else (self.engines.cpu, self.hardware.cpu_step)
        )
        return PacedExecutor(
            real, self.clock, self.written, step, self.hardware.copy, self.rng, wake
        )

    def abort_in(self, stage: str, time: float, request_id: str) -> None:
        """Abort the request once it is seen in that stage, from `time` on."""

        def look() -> None:
            if self._stage(request_id) == stage and self.rng.random() < 0.5:
                self.abort(self.clock.now, request_id)
            elif not self.streams[request_id].complete and self.clock.now < LAST_LOSS:
                self.clock.at(self.clock.now + self.rng.uniform(0.0, 0.01), look)

        self.clock.at(time, look)

    def _noting_aborts(self, on_end: Callable[[str, int], None]) -> Callable[[str, int], None]:
        def noting(request_id: str, last_epoch: int) -> None:
            if last_epoch == ANY_EPOCH:
                self.aborts[self._stage(request_id)] += 1
            on_end(request_id, last_epoch)

        return noting

    def _stage(self, request_id: str) -> str:
        row = self.gpu_scheduler.rows.get(request_id)
        if row is None:
            return "not here"
        there = self.cpu_scheduler.rows.get(request_id)
        match row.phase:
            case Phase.PREFILL:
                return "later chunk" if row.computed else "first chunk"
            case Phase.REMOTE if there is None:
                return "handoff sent"
            case Phase.REMOTE:
                return "with the CPU engine" if there.step is None else "CPU iteration"
        return STAGE_OF_PHASE[row.phase]


@pytest.fixture(scope="module")
def corpus(tiny: Any, make_engines: Callable[..., Any]) -> list[tuple[RequestState, list[int]]]:
    """Requests and their tokens in a run that nothing disturbs, by transformers where greedy."""
    rng = random.Random(0)
    states = []
    for i, prompt in enumerate(tiny.prompts):
        states.append(RequestState(f"g{i}", i, 0, prompt, [], DecodeParams(max_tokens=60)))
    for i in range(19):
        prompt = [rng.randrange(3, 331) for _ in range(rng.randint(1, 70))]
        params = DecodeParams(
            max_tokens=rng.randint(20, 60),
            temperature=rng.choice([0.7, 1.0, 1.5]),
            top_k=rng.choice([0, 20]),
            seed=rng.getrandbits(64),
            presence_penalty=rng.choice([0.0, 0.8]),
        )
        states.append(RequestState(f"s{i}", 10 + i, 0, prompt, [], params))
    again = msgspec.convert(msgspec.to_builtins(states), list[RequestState])
    tokens = make_engines(tiny.source).run(GpuOnlyPolicy(), states).tokens
    for state, answer in zip(again, tiny.answers, strict=False):
        assert tokens[state.id] == answer[:60]
    return [(state, tokens[state.id]) for state in again]


class Round(NamedTuple):
    """What a round has been through."""

    aborts: Counter[str]  # by stage
    moves: list[int]  # copies of each request that ran to its end
    checked: int  # positions whose bytes were compared


def run_round(engines: Any, corpus: list[tuple[RequestState, list[int]]], seed: int) -> Round:
    """Serve the corpus in one disturbed world, and check everything that came of it."""
    rng = random.Random(seed)
    slow = rng.choice(["gpu", "cpu", "copy", "message", "nothing"])
    doubled, lost = rng.choice([0.0, 0.2]), rng.choice([0.0, 0.0, 0.02])

    def draw(name: str, often: float = 0.2) -> float:
        return rng.uniform(0.0, 0.3 if name == slow and rng.random() < often else 0.01)

    def fate(sender: str, to: str, body: AnyMessage) -> Sequence[float]:
        if {sender, to} != {GPU, CPU}:
            return (0.0,)
        if world.clock.now < LAST_LOSS and rng.random() < lost:
            return ()
        return (0.0, rng.uniform(0.0, 1.0)) if rng.random() < doubled else (0.0,)

    gpu_pages, host_pages = rng.choice([(12, 30), (16, 60), (20, 40), (10, 80)])
    hardware = Hardware(
        gpu_pages=gpu_pages,
        host_pages=host_pages,
        gpu_step=lambda batch: draw("gpu"),
        cpu_step=lambda batch: draw("cpu"),
        copy=lambda job: draw("copy", often=1.0),
        # Half of the aborts come upon a request as it was seen.
        delay=lambda sender, to: 0.0 if FRONTEND in (sender, to) else draw("message"),
        page_tokens=PAGE_TOKENS,
        restart=0.1,
        fate=fate,
    )
    world = RealWorld(
        engines,
        rng,
        hardware,
        Restless(rng),
        max_rows=rng.choice([4, 64]),
        max_tokens=rng.choice([CHUNK, 200]),
        gpu_depth=rng.choice([1, 2]),
    )
    expected = {}
    for arrival, (state, tokens) in enumerate(rng.sample(corpus, len(corpus))):
        at = rng.uniform(0.0, 0.5)
        request = RequestState(state.id, arrival, 0, state.prompt, [], state.params)
        expected[request.id] = tokens
        world.submit(at, request)
        if rng.random() < 0.6:
            world.abort_in(rng.choice(STAGES), at, request.id)
    if rng.random() < 0.3:
        world.crash_cpu(rng.uniform(0.0, 5.0))
    if lost:
        world.tick(END)
    world.run(until=END)

    for request_id, tokens in expected.items():
        stream = world.streams[request_id]
        assert stream.failed is None
        assert stream.received == tokens[: len(stream.received)], request_id
        assert stream.aborted or stream.complete, request_id
    world.check_integrity()
    moves = [
        world.written.moves[request_id]
        for request_id in expected
        if not world.streams[request_id].aborted
    ]
    return Round(world.aborts, moves, world.written.checked)


def test_moved_aborted_and_disturbed_requests_keep_every_byte_and_token(
    tiny: Any, make_engines: Any, corpus: list[tuple[RequestState, list[int]]]
) -> None:
    engines = make_engines(tiny.source)
    rounds = []
    for seed in seeds(make_engines.keywords["kind"]):
        try:
            rounds.append(run_round(engines, corpus, seed))
        except BaseException as error:
            error.add_note(f"in the round of DUALPACE_SOAK_SEED={seed}")
            raise
    aborts = sum((each.aborts for each in rounds), Counter())
    moves = [count for each in rounds for count in each.moves]
    print(
        f"{len(rounds)} rounds, {sum(aborts.values())} aborts, {len(moves)} other requests moved "
        f"{statistics.mean(moves):.1f} times, {sum(each.checked for each in rounds)} positions "
        f"compared; aborted: {dict(aborts.most_common())}"
    )
    if len(rounds) >= max(ROUNDS.values()):
        assert statistics.mean(moves) >= 3
        assert not set(STAGES) - set(aborts)


def seeds(kind: str) -> Iterator[int]:
    """Of one round after the other."""
    first = int(os.environ.get("DUALPACE_SOAK_SEED", "0"))
    seconds = os.environ.get("DUALPACE_SOAK_SECONDS")
    print(f"\non {kind}: {seconds or 'no'} seconds, DUALPACE_SOAK_SEED={first}", flush=True)
    if seconds is None:
        yield from range(first, first + ROUNDS[kind])
        return
    end = time.monotonic() + float(seconds)
    for seed in itertools.count(first):
        yield seed
        if time.monotonic() > end:
            return
