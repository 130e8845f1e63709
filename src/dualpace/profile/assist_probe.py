"""Measures the parts of a CPU iteration whose dense work the GPU does, through both executors.

What an assist takes depends on what the GPU does meanwhile, and the other way round: so decodes, or
prompts, run beside. What is not the GPU's is the CPU's, also what a row costs it that attends to
nothing. Knows no engine, no mailbox, no tensors.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dualpace.core.plan import Batch, Executor
from dualpace.policy.cost_model import Point, Whole
from dualpace.profile.beside import DEPTH, Beside, busy_beside, decodes_in
from dualpace.profile.probes import Room, make_batch, probe

ROWS = (2, 8, 32, 64, 128, 256)  # fewer than two are no two halves
# Tokens of all rows; the longest two that fit.
CONTEXTS = (512, 2048, 8192, 32_768, 131_072, 524_288)
REPEATS = 2  # of an iteration, beside the first
MOST_REPEATS = 7  # while they take less than QUICK together: one hiccup weighs the more
QUICK = 0.2  # seconds
STEPS = 4  # of the GPU's that an iteration is measured beside, or more
QUIET_S = 1.0  # of such steps with nothing beside


def probe_assists(
    gpu: Executor,
    cpu: Executor,
    gpu_room: Room,
    host_room: Room,
    dense_seconds: Callable[[int], float],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Point]:
    """Points of `policy.cost_model.PARTS`, for about `seconds`, but at least those without which no
    route can be judged: of the largest batch and the smallest.

    gpu_room without pages: the GPU has no decodes, so that none can be delayed; dense_seconds: of
    the GPU's part of an iteration of so many rows, when it waits for nobody and nothing runs
    beside. Raises what a step raises.
    """
    measure = _Probe(gpu, cpu, host_room, clock, clock() + seconds)
    most = min(host_room.max_rows, host_room.pages)
    sizes = [most, *(rows for rows in reversed(ROWS) if rows < most)]
    sizes.insert(1, sizes.pop())
    decodes = decodes_in(gpu_room)
    prompts = make_batch("gpu_prefill", gpu_room.max_tokens, 0, gpu_room)
    quiet_decode, quiet_prompt = (
        0.0 if batch is None else measure.quiet_step(batch) for batch in (decodes, prompts)
    )
    for number, rows in enumerate(sizes):
        if number > 1 and measure.late:
            return
        whole = measure.shortest(rows, "assisted")
        # What rows cost the CPU that attend to a token each, and the rest, when nothing is beside.
        host = max(0.0, whole - dense_seconds(rows))
        dense = whole - host
        yield Point("cpu_attention", rows, 0, host)
        two = measure.shortest(rows, "assisted2")
        stolen = stolen2 = 0.0
        if decodes is not None:
            beside, stolen = measure.iteration_beside(decodes, quiet_decode, rows, "assisted")
            dense = max(dense, beside - host)
            two, stolen2 = measure.iteration_beside(decodes, quiet_decode, rows, "assisted2")
        yield Point("assist", rows, 0, dense)
        yield Point("assist_stolen", rows, 0, stolen)
        yield Point("assist2", rows, 0, two)
        yield Point("assist2_stolen", rows, 0, stolen2)
        if prompts is not None and not measure.late:
            beside, stolen = measure.iteration_beside(prompts, quiet_prompt, rows, "assisted")
            yield Point("assist_beside_prefill", rows, 0, max(0.0, beside - host))
            yield Point("assist_stolen_beside_prefill", rows, 0, stolen)
            two, stolen2 = measure.iteration_beside(prompts, quiet_prompt, rows, "assisted2")
            yield Point("assist2_beside_prefill", rows, 0, two)
            yield Point("assist2_stolen_beside_prefill", rows, 0, stolen2)
        fitting = [context for context in CONTEXTS if context <= host_room.longest(rows)]
        for place, context in enumerate(fitting[-2:]):
            if place and measure.late:
                break
            # Beside decodes: these use the host's cores and memory, too.
            if (longer := measure.iteration(rows, context, beside=decodes)) is not None:
                yield Point("cpu_attention", rows, context, max(host, longer - dense))


def probe_assisted(
    gpu: Executor,
    cpu: Executor,
    gpu_room: Room,
    host_room: Room,
    operation: Whole,
    points: Sequence[tuple[int, int]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Point]:
    """Whole iterations beside decodes, where there is room for these: (rows, tokens of context) of
    each in `points`. Arguments are otherwise those of `probe_assists`."""
    with busy_beside(gpu, gpu_room, clock):
        yield from probe(operation, cpu, host_room, seconds, clock, points)


@dataclass(frozen=True)
class _Probe:
    gpu: Executor
    cpu: Executor
    room: Room
    clock: Callable[[], float]
    deadline: float

    @property
    def late(self) -> bool:
        return self.clock() >= self.deadline

    def quiet_step(self, batch: Batch) -> float:
        """Seconds of a GPU step with no assist beside."""
        with Beside(self.gpu, batch, self.clock) as steps:
            time.sleep(min(QUIET_S, max(0.0, self.deadline - self.clock()) / 20))
        return statistics.median(steps.times[DEPTH:] or steps.times)

    def shortest(self, rows: int, operation: Whole) -> float:
        """Seconds of one that attends to next to nothing: a token a row."""
        seconds = self.iteration(rows, rows, operation)
        assert seconds is not None
        return seconds

    def iteration(
        self,
        rows: int,
        context: int,
        operation: Whole = "assisted",
        beside: Batch | None = None,
    ) -> float | None:
        """Seconds of one, the median of a few (of two the lesser), beside the GPU's steps of a
        batch if there is one; None if there is no room for it."""
        batch = make_batch(operation, rows, context, self.room)
        if batch is None:
            return None
        times: list[float] = []
        with contextlib.ExitStack() as stack:
            if beside is not None:
                stack.enter_context(Beside(self.gpu, beside, self.clock))
            while self._goes_on(times):
                start = self.clock()
                self.cpu.launch(batch).result()
                times.append(self.clock() - start)
        # The first one warms up; of two, one may have been held up.
        return statistics.median_low(times[1:])

    def _goes_on(self, times: Sequence[float]) -> bool:
        """True until there are enough `times` of an iteration to judge by."""
        if len(times) < 2:
            return True
        most = MOST_REPEATS if sum(times[1:]) < QUICK else REPEATS
        return not self.late and len(times) <= most

    def iteration_beside(
        self, batch: Batch, quiet: float, rows: int, operation: Whole
    ) -> tuple[float, float]:
        """Seconds of the shortest, and how many of these the GPU's steps beside it, which take
        `quiet` seconds by themselves, have lost."""
        with Beside(self.gpu, batch, self.clock) as steps:
            before = len(steps.times)
            wholes = [self.shortest(rows, operation)]
            while len(steps.times) < before + STEPS and steps.running and not self.late:
                wholes.append(self.shortest(rows, operation))
            beside = steps.times[before:] or steps.times
        whole = statistics.median(wholes)
        return whole, whole * max(0.0, 1.0 - quiet / statistics.fmean(beside))
