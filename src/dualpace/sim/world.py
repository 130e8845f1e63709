"""A whole server in virtual time: the product's schedulers, policies and loop, simulated hardware.

Everything that decides is the code that serves; only executors, sockets, clock and client are
simulated. The run is a pure function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import (
    CPU,
    FRONTEND,
    GPU,
    Abort,
    AnyMessage,
    EngineName,
    Failed,
    Lost,
    PeerDown,
    PeerDrained,
    PeerUp,
    Submit,
    Tokens,
)
from dualpace.core.plan import Batch, CopyJob, Executor
from dualpace.core.request import RequestState
from dualpace.loop import EngineLoop
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.view import Policy
from dualpace.scheduler.attendant import Attendant
from dualpace.scheduler.cpu import CpuScheduler
from dualpace.scheduler.gated import GatedScheduler
from dualpace.scheduler.gated_cpu import GatedCpuScheduler
from dualpace.scheduler.gpu import GpuScheduler
from dualpace.sim.clock import VirtualClock
from dualpace.sim.executor import SimulatedExecutor, SimulatedMemory, simulated_logprobs
from dualpace.sim.network import Network, SimulatedPort

REGISTERED_PARTS = 8


@dataclass(frozen=True)
class Hardware:
    """How long things take, in seconds, and how many pages there are.

    `delay(sender, to)` is a message's travel time; from a process to itself, its time to wake.
    `registration` is how long it takes until all host pages can be copied, some by some.
    `gpu_failure(batch)` may give the error with which a step of the GPU engine ends, and
    `fate(sender, to, body)` what else than one delivery becomes of a message (see `Network`).
    """

    gpu_pages: int
    host_pages: int
    gpu_step: Callable[[Batch], float]
    cpu_step: Callable[[Batch], float]
    copy: Callable[[CopyJob], float]
    delay: Callable[[str, str], float]
    page_tokens: int = 32
    restart: float = 1.0
    registration: float = 0.0
    gpu_failure: Callable[[Batch], Exception | None] = lambda batch: None
    fate: Callable[[str, str, AnyMessage], Sequence[float]] = lambda sender, to, body: (0.0,)


@dataclass
class Stream:
    """What a simulated client has received of one request."""

    state: RequestState
    sent_at: float
    epoch: int = 0
    tokens: dict[int, tuple[int, float, EngineName]] = field(default_factory=dict)
    count: int | None = None
    failed: str | None = None
    aborted: bool = False

    @property
    def received(self) -> list[int]:
        """Tokens 0, 1, … up to the first gap."""
        tokens: list[int] = []
        while len(tokens) in self.tokens:
            tokens.append(self.tokens[len(tokens)][0])
        return tokens

    def logprobs_of(self, token: int) -> TokenLogprobs | None:
        """What must come with a token."""
        return None if self.state.params.logprobs is None else simulated_logprobs(token)

    @property
    def complete(self) -> bool:
        return self.count is not None and len(self.received) == self.count


@dataclass
class Engine:
    """One simulated engine: its loop, and the port and executor the loop uses."""

    loop: EngineLoop
    port: SimulatedPort
    executor: Executor
    alive: bool = True

    def turn(self) -> None:
        """Step the loop until it has nothing left to do at this moment."""
        while self.alive:
            before = self._progress()
            self.loop.step()
            if self._progress() == before and not self.port.inbox:
                return

    def _progress(self) -> tuple[int, int, int]:
        steps: int = getattr(self.loop.scheduler, "steps", 0)
        return steps, len(self.loop.steps), len(self.loop.copies)


class World:
    """Submit, abort and crash at chosen times, then `run`.

    Without `check_kv` pages have no contents and all tokens are the same: fast, for measurements.
    Under a gated policy host rows are attended to by the GPU engine's steps themselves, or, if
    `attended`, with a CPU engine that is told of them and may die, as in the product; with
    `whole_prompts`, as in NEO, a step takes a prompt however long it is.
    """

    def __init__(
        self,
        hardware: Hardware,
        policy: Policy,
        max_rows: int = 256,
        max_tokens: int = 2048,
        *,
        check_kv: bool = True,
        gpu_depth: int = 2,
        clock: VirtualClock | None = None,
        attended: bool = False,
        whole_prompts: bool = False,
    ) -> None:
        self.hardware = hardware
        self.policy = policy
        self.whole_prompts = whole_prompts
        self.max_rows = max_rows
        self.clock = clock or VirtualClock()
        self.network = Network(self.clock, hardware.delay, hardware.fate)
        self.memory = SimulatedMemory(hardware.page_tokens) if check_kv else None
        self.streams: dict[str, Stream] = {}
        self.on_end: Callable[[Stream], None] = lambda stream: None  # answered or failed
        self.port = self.network.port(FRONTEND, self._receive)
        self.usable_host_pages = 0
        self.gated = isinstance(policy, GatedPolicy)
        self.attendant = Attendant() if self.gated and attended else None
        self.gpu_scheduler = self._gpu_scheduler(max_tokens)
        self.gpu = self._engine(GPU, self.gpu_scheduler, gpu_depth)
        for part in range(1, REGISTERED_PARTS + 1):
            self.clock.at(hardware.registration * part / REGISTERED_PARTS, self._registered(part))
        self._start_cpu()

    # -- what happens, and when ------------------------------------------------------------------

    def submit(self, time: float, state: RequestState) -> None:
        def event() -> None:
            self.streams[state.id] = Stream(state, self.clock.now)
            self.port.send(GPU, Submit(state))

        self.clock.at(time, event)

    def abort(self, time: float, request_id: str) -> None:
        def event() -> None:
            stream = self.streams.get(request_id)
            if stream is not None and not stream.complete:
                stream.aborted = True
                self._abort(request_id)

        self.clock.at(time, event)

    def crash_cpu(self, time: float) -> None:
        """Kill the CPU engine; the supervisor notices, and restarts it once the GPU is ready."""

        def event() -> None:
            if not self.cpu.alive:
                return
            self.cpu.alive = False
            self.cpu.executor.close()
            self.network.port(CPU, lambda: None)
            self.port.send(GPU, PeerDown(self.network.generation))

        self.clock.at(time, event)

    def tick(self, until: int) -> None:
        """Wake both engines every second, as their loops wake when nothing happens."""

        def event() -> None:
            self.gpu.turn()
            self.cpu.turn()

        for second in range(until):
            self.clock.at(second, event)

    def run(self, until: float = float("inf")) -> None:
        self.clock.run(until)

    def check_integrity(self) -> None:
        """After all requests have ended: nothing is held, nothing is remembered."""
        for engine in (self.gpu, self.cpu):
            engine.loop.scheduler.idle()
        for scheduler in (self.gpu_scheduler, self.cpu_scheduler):
            for pool in scheduler.pools:
                pool.check_integrity(idle=True)
            if not isinstance(scheduler, GatedCpuScheduler):
                assert not scheduler.rows, scheduler.rows
        if isinstance(self.gpu_scheduler, GatedScheduler) or isinstance(
            self.cpu_scheduler, GatedCpuScheduler
        ):
            return
        mover = self.gpu_scheduler.mover
        assert not mover.ending
        if mover.host_up:
            assert mover.host_open
            assert mover.host_pages_free == self.cpu_scheduler.pool.free

    def make_executor(self, name: EngineName, wake: Callable[[], None]) -> Executor:
        """What an engine runs on, made anew at each of its starts. A subclass may put another one
        here; what a killed engine's executor has under way when it is closed must never end."""
        hardware, on_gpu = self.hardware, name == "gpu"
        return SimulatedExecutor(
            self.clock,
            # What a CPU engine does within the GPU engine's steps is done with these.
            self.memory if on_gpu or self.attendant is None else None,
            hardware.gpu_step if on_gpu else hardware.cpu_step,
            hardware.copy,
            wake,
            hardware.gpu_failure if on_gpu else lambda batch: None,
            lands=on_gpu and (not self.gated or self.attendant is not None),
        )

    # -- inside ----------------------------------------------------------------------------------

    def _gpu_scheduler(self, max_tokens: int) -> GpuScheduler | GatedScheduler:
        """The GPU engine's; for a gated policy the only one, which owns the host's pages, too."""
        hardware = self.hardware
        if self.gated:
            usable = hardware.host_pages if self.attendant is None else 0
            return GatedScheduler(
                self.policy, hardware.gpu_pages, hardware.host_pages, hardware.page_tokens,
                self.max_rows, max_tokens, attendant=self.attendant,
                whole_prompts=self.whole_prompts,
                usable_host_pages=lambda: max(usable, self.usable_host_pages),
            )  # fmt: skip
        return GpuScheduler(
            self.policy, hardware.gpu_pages, hardware.page_tokens, self.max_rows, max_tokens,
            usable_host_pages=lambda: self.usable_host_pages,
        )  # fmt: skip

    def _registered(self, part: int) -> Callable[[], None]:
        def event() -> None:
            self.usable_host_pages = self.hardware.host_pages * part // REGISTERED_PARTS
            self.gpu.turn()

        return event

    def _engine(
        self,
        name: EngineName,
        scheduler: GpuScheduler | GatedScheduler | CpuScheduler | GatedCpuScheduler,
        depth: int = 1,
    ) -> Engine:
        def turn() -> None:
            engine.turn()

        def notice() -> None:
            # A process takes a moment to wake: what arrives meanwhile is drained with it.
            self.clock.at(self.clock.now + self.hardware.delay(name, name), turn)

        port = self.network.port(name, notice)
        executor = self.make_executor(name, turn)
        loop = EngineLoop(scheduler, executor, port, self.clock, depth)
        engine = Engine(loop, port, executor)
        return engine

    def _start_cpu(self) -> None:
        hardware = self.hardware
        uses_host = self.policy.uses_host and (not self.gated or self.attendant is not None)
        pages = hardware.host_pages if uses_host else 0
        self.cpu_scheduler: CpuScheduler | GatedCpuScheduler
        if self.attendant is not None:
            self.cpu_scheduler = GatedCpuScheduler()
        else:
            self.cpu_scheduler = CpuScheduler(
                self.policy, pages, hardware.page_tokens, self.max_rows
            )
        self.cpu = self._engine(CPU, self.cpu_scheduler)
        if uses_host:
            self.port.send(GPU, PeerUp(self.network.generation, "", pages))

    def _abort(self, request_id: str) -> None:
        for engine in (GPU, CPU):
            self.port.send(engine, Abort(request_id))

    def _receive(self) -> None:
        for envelope in self.port.drain():
            body = envelope.body
            if isinstance(body, Tokens):
                sender: EngineName = "gpu" if envelope.sender == GPU else "cpu"
                for event in body.events:
                    stream = self.streams[event.request_id]
                    if event.epoch < stream.epoch:
                        continue
                    engine = "cpu" if event.attended else sender
                    token = (event.token_id, self.clock.now, engine)
                    known = stream.tokens.setdefault(event.index, token)
                    assert known[0] == event.token_id, f"token {event.index} came out differently"
                    assert event.logprobs == stream.logprobs_of(event.token_id)
                    if event.finish is not None:
                        stream.count = event.index + 1
                        self.on_end(stream)
            elif isinstance(body, Failed):
                failed = self.streams[body.request_id]
                failed.failed = body.reason
                self.on_end(failed)
            elif isinstance(body, Lost):
                for request_id, epoch in body.requests:
                    self._resubmit(self.streams[request_id], epoch)
            elif isinstance(body, PeerDrained):
                self.network.generation += 1
                self.clock.at(self.clock.now + self.hardware.restart, self._start_cpu)

    def _resubmit(self, stream: Stream, epoch: int) -> None:
        if stream.aborted or stream.complete:
            return
        state = stream.state
        stream.epoch = epoch
        stream.tokens = {index: stream.tokens[index] for index in range(len(stream.received))}
        resumed = RequestState(
            state.id, state.arrival, epoch, state.prompt, stream.received, state.params
        )
        resumed.logprobs = [
            each for each in map(stream.logprobs_of, stream.received) if each is not None
        ]
        self.port.send(GPU, Submit(resumed))
