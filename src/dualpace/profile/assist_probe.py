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

from dualpace.core.plan import Batch, Executor
from dualpace.policy.cost_model import Part, Point, Whole
from dualpace.profile.beside import DEPTH, Beside, busy_beside, decodes_in
from dualpace.profile.probes import Room, make_batch, probe

ROWS = (2, 64, 128, 32, 8)  # beside the most, in the order of what they tell; one has no halves
REPEATS = 3  # of an iteration, beside the first: one may be held up
MOST_REPEATS = 7  # while they take less than QUICK together: a hiccup weighs the more
QUICK = 0.2  # seconds
STEPS = 4  # of the GPU's that an iteration is measured beside, or more
QUIET_S = 1.0  # of such steps with nothing beside
# What an iteration is, beside prompts, and what it takes from them.
BESIDE_PROMPTS: dict[Whole, tuple[Part, Part]] = {
    "assisted": ("assist_beside_prefill", "assist_stolen_beside_prefill"),
    "assisted2": ("assist2_beside_prefill", "assist2_stolen_beside_prefill"),
}


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
    measure = _Probe(gpu, cpu, gpu_room, host_room, dense_seconds, clock, clock() + seconds)
    most = min(host_room.max_rows, host_room.pages)
    sizes = [most, *(rows for rows in ROWS if rows < most)]
    needed, others = sizes[:2], sizes[2:]
    for rows in needed:
        yield from measure.beside_decodes(rows)
    for part, rows in (
        *((measure.beside_prompts, rows) for rows in needed),
        *((measure.beside_decodes, rows) for rows in others),
        *((measure.beside_prompts, rows) for rows in others),
    ):
        if measure.late:
            return
        yield from part(rows)


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


class _Probe:
    """Arguments are those of `probe_assists`; deadline: by `clock`."""

    def __init__(
        self,
        gpu: Executor,
        cpu: Executor,
        gpu_room: Room,
        host_room: Room,
        dense_seconds: Callable[[int], float],
        clock: Callable[[], float],
        deadline: float,
    ) -> None:
        self._gpu = gpu
        self._cpu = cpu
        self._room = host_room
        self._dense_seconds = dense_seconds
        self._clock = clock
        self._deadline = deadline
        self._most_context = host_room.longest(min(host_room.max_rows, host_room.pages))
        self._host: dict[int, float] = {}  # by rows: what they cost the CPU that attend to nothing
        self._decodes = decodes_in(gpu_room)
        self._prompts = make_batch("gpu_prefill", gpu_room.max_tokens, 0, gpu_room)
        self._quiet_decode = self._quiet_step(self._decodes)
        self._quiet_prompt = self._quiet_step(self._prompts)

    @property
    def late(self) -> bool:
        return self._clock() >= self._deadline

    def beside_decodes(self, rows: int) -> list[Point]:
        """The CPU's part, the GPU's, and what this takes from decodes."""
        # The shortest attend to a token a row, which is next to nothing.
        whole = self._iteration(rows, rows, "assisted")
        two = self._iteration(rows, rows, "assisted2")
        host = self._host[rows] = max(0.0, whole - self._dense_seconds(rows))
        dense, stolen, stolen2 = whole - host, 0.0, 0.0
        attention = [Point("cpu_attention", rows, 0, host)]
        longest = self._longest(rows)
        with self._beside(self._decodes) as steps:
            if steps is not None:
                quiet = self._quiet_decode
                beside, stolen = self._iteration_beside(steps, quiet, rows, rows, "assisted")
                dense = max(dense, beside - host)
                two, stolen2 = self._iteration_beside(steps, quiet, rows, rows, "assisted2")
            # Beside decodes as well, which use the host's cores and memory. The longest comes
            # first: a short one is read from caches.
            for context in (longest, longest // 4):
                if context > rows and not (self.late and len(attention) > 1):
                    seconds = self._iteration(rows, context, "assisted") - dense
                    attention.append(Point("cpu_attention", rows, context, max(host, seconds)))
        return [
            *attention,
            Point("assist", rows, 0, dense),
            Point("assist_stolen", rows, 0, stolen),
            Point("assist2", rows, 0, two),
            Point("assist2_stolen", rows, 0, stolen2),
        ]

    def beside_prompts(self, rows: int) -> list[Point]:
        """What beside prompts is not as `beside_decodes` has found it for so many rows."""
        if self._prompts is None:
            return []
        points = []
        longest, quiet = self._longest(rows), self._quiet_prompt
        with Beside(self._gpu, self._prompts, self._clock) as steps:
            for operation, (assist, taken) in BESIDE_PROMPTS.items():
                seconds, stolen = self._iteration_beside(steps, quiet, rows, rows, operation)
                host = self._host[rows] if operation == "assisted" else 0.0
                points.append(Point(assist, rows, 0, max(0.0, seconds - host)))
                points.append(Point(taken, rows, 0, stolen))
                # A prompt may lose more by an assist now and then than by each of many in a row. Of
                # a context that is short whatever is measured says nothing about a long one.
                if longest > rows and longest >= self._most_context / 2:
                    _, stolen = self._iteration_beside(steps, quiet, rows, longest, operation)
                    points.append(Point(taken, rows, longest, stolen))
        return points

    def _longest(self, rows: int) -> int:
        """Tokens of context to measure so many rows with: those of all, unless these are few."""
        longest, most = self._room.longest(rows), self._most_context
        return most if longest / 2 <= most <= longest else longest

    def _quiet_step(self, batch: Batch | None) -> float:
        """Seconds of a GPU step with no assist beside."""
        with self._beside(batch) as steps:
            if steps is None:
                return 0.0
            time.sleep(min(QUIET_S, max(0.0, self._deadline - self._clock()) / 20))
        return statistics.median(steps.times[DEPTH:] or steps.times)

    @contextlib.contextmanager
    def _beside(self, batch: Batch | None) -> Iterator[Beside | None]:
        """With the GPU's steps of a batch under way, if there is one."""
        if batch is None:
            yield None
            return
        with Beside(self._gpu, batch, self._clock) as steps:
            yield steps

    def _iteration(self, rows: int, context: int, operation: Whole) -> float:
        """Seconds of one for which there is room, the median of a few."""
        batch = make_batch(operation, rows, context, self._room)
        assert batch is not None
        times: list[float] = []
        while self._goes_on(times):
            start = self._clock()
            self._cpu.launch(batch).result()
            times.append(self._clock() - start)
        return statistics.median(times[1:])  # the first one warms up

    def _goes_on(self, times: Sequence[float]) -> bool:
        """True until there are enough `times` of an iteration to judge by: an odd number, so that
        the median is one of them."""
        count = len(times) - 1
        if count < 1:
            return True
        enough = MOST_REPEATS if sum(times[1:]) < QUICK else REPEATS
        return not self.late and (count < enough or count % 2 == 0)

    def _iteration_beside(
        self, steps: Beside, quiet: float, rows: int, context: int, operation: Whole
    ) -> tuple[float, float]:
        """Seconds of one, and how many of these the GPU's steps beside it, which take `quiet`
        seconds by themselves, have lost."""
        before = len(steps.times)
        wholes = [self._iteration(rows, context, operation)]
        while len(steps.times) < before + STEPS and steps.running and not self.late:
            wholes.append(self._iteration(rows, context, operation))
        beside = steps.times[before:] or steps.times
        whole = statistics.median(wholes)
        return whole, whole * max(0.0, 1.0 - quiet / statistics.fmean(beside))
