"""The engine loop: drain, plan, launch, wait, commit, emit. There is no other.

The GPU engine, the CPU engine and the simulator run it with their own scheduler (what the engine
owns and decides) and executor (what computes). While a step runs the loop goes on answering
messages.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from dualpace.core.errors import FatalEngineError
from dualpace.core.messages import AnyMessage, Envelope
from dualpace.core.plan import Batch, CopyJob, Executor, StepResult, Ticket
from dualpace.core.timeline import Timeline
from dualpace.ipc import Port

Outcome = TypeVar("Outcome")


class Scheduler(Protocol):
    """The owner's side of an engine: requests, pages, protocol. Never waits, never computes."""

    stopped: bool

    def on_message(self, envelope: Envelope) -> None:
        """Take in a message; answers are left in the outbox."""
        ...

    def plan(self, now: float) -> Batch | None:
        """Decide the next step, or None if there is nothing to run."""
        ...

    def take_copies(self) -> list[CopyJob]:
        """Copies to start now."""
        ...

    def commit(self, batch: Batch, result: StepResult) -> None:
        """A step has completed."""
        ...

    def fail(self, batch: Batch, error: Exception) -> None:
        """A step has failed; nothing of it counts."""
        ...

    def copied(self, job: CopyJob, error: Exception | None) -> None:
        """A copy has completed, or failed."""
        ...

    def take_messages(self) -> list[tuple[str, AnyMessage]]:
        """Messages to send, in order, each with its addressee."""
        ...

    def idle(self) -> None:
        """Nothing is under way: the moment for integrity checks."""
        ...


class _Start(NamedTuple):
    """Of a step or copy: the how many-th, and when."""

    number: int
    time: float


class EngineLoop:
    """Runs one engine until its scheduler has stopped.

    depth: steps that may be under way at once. With 1 the next step is planned when the last has
    been committed; with 2 it is planned and launched while the last one runs, so that the device
    never waits for the host. beat: called in every turn with the number of the oldest step or copy
    under way, 0 for none; who gets the same number for too long has an engine that hangs. timeline:
    gets what the loop does, and all steps and copies, from their start until they are taken in.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        port: Port,
        clock: Callable[[], float],
        depth: int = 1,
        beat: Callable[[int], None] = lambda oldest: None,
        timeline: Timeline | None = None,
    ) -> None:
        self.depth = depth
        self.beat = beat
        self.timeline = timeline
        self.scheduler = scheduler
        self.executor = executor
        self.port = port
        self.clock = clock
        self.steps: deque[tuple[Batch, Ticket[StepResult]]] = deque()
        self.copies: list[tuple[CopyJob, Ticket[None]]] = []
        self._started = 0
        self._under_way: dict[Ticket[Any], _Start] = {}  # in the order of their start

    def run(self) -> None:
        """Step until the scheduler has stopped and nothing is under way."""
        while not self.scheduler.stopped or self.steps or self.copies:
            self.step()

    def step(self) -> None:
        """One turn. Returns after a message, a completion, or (idle) a second."""
        self.beat(next((start.number for start in self._under_way.values()), 0))
        with self._noted("drain"):
            self.drain()
        with self._noted("plan and launch"):
            self.plan_and_launch()
        self.emit()
        self.wait()
        with self._noted("commit"):
            self.commit()
            self.emit()

    def drain(self) -> None:
        for envelope in self.port.drain():
            self.scheduler.on_message(envelope)

    def plan_and_launch(self) -> None:
        """Start the next steps, as many as may be under way, and the copies that wait."""
        while len(self.steps) < self.depth:
            batch = self.scheduler.plan(self.clock())
            if batch is None:
                break
            self.steps.append((batch, self._number(self.executor.launch(batch))))
        for job in self.scheduler.take_copies():
            self.copies.append((job, self._number(self.executor.copy(job))))

    def _number(self, ticket: Ticket[Outcome]) -> Ticket[Outcome]:
        self._started += 1
        self._under_way[ticket] = _Start(self._started, self.clock())
        return ticket

    def _noted(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.timeline.span("loop", name) if self.timeline else contextlib.nullcontext()

    def wait(self) -> None:
        something = self.port.wait(1.0)
        if not something and not self.steps and not self.copies:
            self.scheduler.idle()

    def commit(self) -> None:
        """Take in completed steps in order, and completed copies in any order."""
        while self.steps and self.steps[0][1].done():
            batch, ticket = self.steps.popleft()
            start = self._under_way.pop(ticket)
            if self.timeline:
                name, end = f"step {batch.number}", self.clock()
                self.timeline.add("steps", name, start.time, end, **_facts(batch))
            try:
                result = ticket.result()
            except FatalEngineError:
                raise
            except Exception as error:  # whatever else the device raised costs this step, no more
                self.scheduler.fail(batch, error)
            else:
                self.scheduler.commit(batch, result)
        under_way = []
        for job, copy in self.copies:
            if not copy.done():
                under_way.append((job, copy))
                continue
            start = self._under_way.pop(copy)
            if self.timeline:
                name = f"{job.kind} {job.request_id}"
                self.timeline.add("copies", name, start.time, self.clock(), pages=len(job.source))
            try:
                copy.result()
            except Exception as error:
                self.scheduler.copied(job, error)
            else:
                self.scheduler.copied(job, None)
        self.copies = under_way

    def emit(self) -> None:
        for to, message in self.scheduler.take_messages():
            self.port.send(to, message)


def _facts(batch: Batch) -> dict[str, int | str]:
    """What decides how long a step takes. context: positions that all rows attend to together;
    chunks: of prompts, tokens + those computed before."""
    chunks = [f"{len(row.tokens)}+{row.start}" for row in batch.rows if len(row.tokens) > 1]
    return {
        "rows": len(batch.rows),
        "tokens": batch.num_tokens,
        "context": sum(row.end for row in batch.rows),
        "host_rows": sum(row.tier == "host" for row in batch.rows),
        "chunks": " ".join(chunks),
    }
