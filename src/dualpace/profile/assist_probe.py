"""Measures the parts of a CPU iteration whose dense work the GPU does, through both executors.

What an assist takes depends on what the GPU does meanwhile, and the other way round: so decodes, or
prompts, run beside in a thread of their own. Knows no engine, no mailbox, no tensors.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec

from dualpace.core.plan import Batch, Executor, StepResult, Ticket
from dualpace.policy.cost_model import Operation, Point
from dualpace.profile.probes import Room, make_batch

ROWS = (8, 32, 64, 128, 256)
CONTEXTS = (16_384, 65_536, 262_144)  # tokens of all rows
REPEATS = 5
DECODES = 32  # rows of the GPU's steps beside
DEPTH = 2  # of them are under way at once, as in the engine


class Beside:
    """Keeps an executor busy with one batch, over and over, while the context is open."""

    def __init__(self, executor: Executor, batch: Batch, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._batch = batch
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self.times: list[float] = []  # seconds from the end of one step to that of the next
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        while len(self.times) < DEPTH and self._thread.is_alive():
            time.sleep(1e-3)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None and error is None:
            raise self.error

    def _run(self) -> None:
        under_way: deque[Ticket[StepResult]] = deque()
        before = self._clock()
        try:
            while not self._stop.is_set() or under_way:
                while len(under_way) < DEPTH and not self._stop.is_set():
                    under_way.append(self._executor.launch(self._batch))
                under_way.popleft().result()
                now = self._clock()
                self.times.append(now - before)
                before = now
        except Exception as error:
            self.error = error


def probe_assists(
    gpu: Executor,
    cpu: Executor,
    gpu_room: Room,
    host_room: Room,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Point]:
    """Points of `policy.cost_model.PARTS`, for about `seconds`, those without which no route can be
    judged first.

    gpu_room without pages: the GPU has no decodes, so that none can be delayed. Raises what a step
    raises.
    """
    deadline = clock() + seconds
    sizes = [rows for rows in ROWS if rows < host_room.max_rows] + [host_room.max_rows]
    order = [sizes[-1], *sizes[:-1]] if len(sizes) > 1 else sizes
    decodes = _decodes(gpu_room)
    prompts = make_batch("gpu_prefill", gpu_room.max_tokens, 0, gpu_room)

    def iteration(rows: int, context: int) -> float | None:
        """Seconds, the median of a few; None if there is no room for such a batch."""
        batch = make_batch("cpu_iteration", rows, context, host_room)
        if batch is None:
            return None
        batch = msgspec.structs.replace(batch, route="assist")
        times: list[float] = []
        while len(times) < 2 or (len(times) <= REPEATS and clock() < deadline):
            start = clock()
            cpu.launch(batch).result()
            times.append(clock() - start)
        return statistics.median(times[1:])  # the first one warms up

    alone: dict[int, float] = {}
    quiet = 0.0  # seconds of the GPU's step without an assist beside
    if decodes is not None:
        with Beside(gpu, decodes, clock) as steps:
            time.sleep(min(0.3, seconds / 20))
        quiet = statistics.median(steps.times[DEPTH:] or steps.times)
    for number, rows in enumerate(order):
        if number > 1 and clock() >= deadline:
            return
        dense = iteration(rows, rows)
        if dense is None:
            continue
        alone[rows] = dense
        stolen = 0.0
        if decodes is not None:
            with Beside(gpu, decodes, clock) as steps:
                start = len(steps.times)
                dense = iteration(rows, rows) or dense
                beside = steps.times[start:]
            stolen = dense * max(0.0, 1.0 - quiet / (statistics.fmean(beside) if beside else quiet))
        yield Point("assist", rows, 0, dense)
        yield Point("assist_stolen", rows, 0, stolen)
        for context in CONTEXTS[:1] if number else CONTEXTS:
            if (whole := iteration(rows, context)) is not None:
                yield Point("cpu_attention", rows, context, max(0.0, whole - alone[rows]))
        yield Point("cpu_attention", rows, 0, 0.0)
    for rows in order if prompts is not None else ():
        if clock() >= deadline:
            return
        assert prompts is not None
        with Beside(gpu, prompts, clock):
            dense = iteration(rows, rows)
        if dense is not None:
            yield Point("assist_beside_prefill", rows, 0, dense)


def _decodes(room: Room) -> Batch | None:
    """Full seats, as nearly as the room allows it."""
    rows = min(DECODES, room.max_rows, room.pages)
    operation: Operation = "gpu_decode"
    context = min(rows * 1024, rows * room.max_model_len, room.pages * room.page_tokens)
    while rows and context >= rows:
        if (batch := make_batch(operation, rows, context, room)) is not None:
            return batch
        context //= 2
    return None
