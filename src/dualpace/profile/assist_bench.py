"""What Dense Assist takes, layer by layer, and what it costs the GPU's own steps.

`measure` plays the CPU engine's half of the mailbox without attending to anything: it sleeps for as
long as attention would take. `measure_iterations` runs the CPU engine itself. Knows the mailbox and
executors; no tensors.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from dualpace.assist.mailbox import SLOTS, Mailbox
from dualpace.core.errors import AssistError
from dualpace.core.plan import Batch, Executor, Route
from dualpace.profile.beside import DEPTH, Beside

WARM_UP, ITERATIONS = 2, 6
ROUNDS = 3
ROUTES: tuple[Route, ...] = ("assist", "assist2")


class Turns(msgspec.Struct, frozen=True):
    """One way of running an iteration. Seconds; medians over its layers and some iterations.

    beside: what the GPU's own steps were doing. slots: micro-batches of `rows` rows each.
    attention: what the CPU took for a layer of each. turn: from `go` to when the next `done` was
    seen, which with two slots is after the other one's attention at the earliest.
    """

    rows: int
    slots: int
    beside: str
    attention: float
    launch: float  # from the bell to the first `done`
    turn: float
    turn_p90: float
    last: float  # from the last `go` to tokens
    iteration: float
    step: float | None  # a step of the GPU's own meanwhile
    slowdown: float | None  # how much longer that is than without an assist, as a part


class Work(msgspec.Struct, frozen=True):
    """The same work as one graph in which nobody waits: seconds of a layer, and of the rest."""

    rows: int
    layer: float
    copies: float  # of a layer, both ways
    over: float  # of a turn alone, over `layer`


class Iteration(msgspec.Struct, frozen=True):
    """Whole iterations of the CPU engine itself. gb_s: KV of the rows over the time; read_gb_s: of
    the same memory when it is only read, in turns with them; fraction: one of the other."""

    rows: int
    tokens: int  # of each row
    route: Route
    beside: str
    seconds: float
    gb_s: float
    read_gb_s: float
    fraction: float
    step: float | None
    slowdown: float | None


class AssistReport(msgspec.Struct, frozen=True):
    model: str
    layers: int
    work: list[Work]
    turns: list[Turns]
    quiet: dict[str, float]  # seconds of the GPU's own steps, with no assist beside
    iterations: list[Iteration] = []


def measure(
    mailbox: Mailbox,
    gpu: Executor,
    seconds_without_turns: Callable[[int, bool], float],
    beside: Mapping[str, Batch],
    model: str,
    *,
    rows: Sequence[int],
    attention: Sequence[float],
    on_step: Callable[[str], None] = lambda what: None,
) -> AssistReport:
    """mailbox: the CPU's end; seconds_without_turns(rows, copies); beside: batches to keep the GPU
    busy with, by name; attention: seconds of a layer.

    Raises `AssistError` where the GPU engine does not do its part.
    """
    layers = mailbox.layout.num_layers
    player = _Player(mailbox)
    turns, work, quiet = [], [], {}
    for name, batch in beside.items():
        on_step(f"{name} alone")
        with Beside(gpu, batch, time.perf_counter) as steps:
            time.sleep(1.0)
        quiet[name] = _step(steps)
    for count in rows:
        on_step(f"{count} rows alone")
        alone = player.run(count, 1, 0.0)
        with_copies, without = (seconds_without_turns(count, copies) for copies in (True, False))
        # `last` has the rest of the last layer.
        layer = (without - alone.last) / max(1, layers - 1)
        work.append(Work(count, layer, (with_copies - without) / layers, alone.turn - layer))
        turns.append(alone)
        for name, batch in beside.items():
            for seconds in attention:
                for slots in range(1, SLOTS + 1):
                    on_step(f"{count} rows, {slots} × {seconds * 1e3:g} ms beside {name}")
                    with Beside(gpu, batch, time.perf_counter) as steps:
                        made = player.run(count, slots, seconds)
                    step = _step(steps)
                    turns.append(
                        msgspec.structs.replace(
                            made, beside=name, step=step, slowdown=step / quiet[name] - 1.0
                        )
                    )
    return AssistReport(model, layers, work, turns, quiet)


def _step(steps: Beside) -> float:
    """Seconds of a step, the mean of those that were not there to fill the queue."""
    return statistics.fmean(steps.times[DEPTH:] or steps.times)


def measure_iterations(
    cpu: Executor,
    gpu: Executor,
    read_seconds: Callable[[int], float],
    beside: Mapping[str, Batch],
    quiet: Mapping[str, float],
    batch: Batch,
    token_bytes: int,
    *,
    on_step: Callable[[str], None] = lambda what: None,
) -> list[Iteration]:
    """cpu: the CPU engine's executor, assisted by `gpu`; read_seconds(size): of its arena; batch:
    of rows of one length; token_bytes: KV of a token, all layers."""
    rows, tokens = len(batch.rows), batch.rows[0].end
    size = rows * tokens * token_bytes
    found = []
    for name in ("nothing", *beside):
        for route in ROUTES:
            on_step(f"{rows} rows of {tokens} tokens by {route} beside {name}")
            asked = msgspec.structs.replace(batch, route=route)
            cpu.launch(asked).result()
            reads, times, steps = [], [], list[float]()
            for _ in range(ROUNDS):
                reads.append(read_seconds(size))
                with contextlib.ExitStack() as stack:
                    busy = None
                    if name in beside:
                        busy = stack.enter_context(Beside(gpu, beside[name], time.perf_counter))
                    start = time.perf_counter()
                    cpu.launch(asked).result()
                    times.append(time.perf_counter() - start)
                if busy is not None:
                    steps += busy.times[DEPTH:]
            seconds, read = statistics.median(times), size / statistics.median(reads) / 1e9
            speed = size / seconds / 1e9
            step = statistics.fmean(steps) if steps else None
            found.append(
                Iteration(
                    rows, tokens, route, name, seconds, speed, read, speed / read,
                    step, None if step is None else step / quiet[name] - 1.0,
                )
            )  # fmt: skip
    return found


class _Player:
    """The CPU engine's half of the mailbox, with rows of arbitrary tokens."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._iterations = 0
        rng = np.random.default_rng(0)
        for slot in range(SLOTS):
            self._array(slot, "positions", np.int64)[:] = 1000
            self._array(slot, "temperatures", np.float64)[:] = 0.0
            area = mailbox.area(slot, "attended")
            # bfloat16 between 1 and 2, of either sign: half of float32's bytes.
            noise = rng.integers(0x3F80, 0x3FFF, area.nbytes // 2, dtype=np.uint16)
            area.view(np.uint16)[:] = noise | (rng.integers(0, 2, noise.size) << 15)

    def run(self, rows: int, slots: int, attention: float) -> Turns:
        """Iterations of so many rows in each slot, with nothing beside as far as this knows.

        attention: seconds of a layer, for which it sleeps. Raises `AssistError`.
        """
        launches, turns, lasts, whole = [], [], [], []
        for number in range(WARM_UP + ITERATIONS):
            launch, between, last, total = self._iterate(rows, slots, attention)
            if number >= WARM_UP:
                launches.append(launch)
                turns += between
                lasts.append(last)
                whole.append(total)
        return Turns(
            rows=rows,
            slots=slots,
            beside="nothing",
            attention=attention,
            launch=statistics.median(launches),
            turn=statistics.median(turns),
            turn_p90=float(np.quantile(turns, 0.9)),
            last=statistics.median(lasts),
            iteration=statistics.median(whole),
            step=None,
            slowdown=None,
        )

    def _iterate(
        self, rows: int, slots: int, attention: float
    ) -> tuple[float, list[float], float, float]:
        """Seconds of one: launch, turns, last and all of it, as `Turns` has them."""
        box, layers = self._mailbox, self._mailbox.layout.num_layers
        self._check(box.begin())
        self._iterations += 1
        start = time.perf_counter()
        for slot in range(slots):
            self._array(slot, "tokens", np.int32)[:rows] = 7
            box.submit(slot, self._iterations, rows, b"")
        box.ring()
        launch, turns = 0.0, []
        gone = [start] * slots
        for layer in range(layers + 1):
            for slot in range(slots):
                self._check(box.wait_done(slot, layer))
                now = time.perf_counter()
                if layer == 0:
                    launch = launch or now - start
                elif layer < layers:
                    turns.append(now - gone[slot])
                if layer < layers:
                    if attention:  # asleep, so that threads beside get the interpreter
                        time.sleep(attention)
                    box.post_go(slot, layer)
                    gone[slot] = time.perf_counter()
        end = time.perf_counter()
        return launch, turns, end - gone[-1], end - start

    def _array(self, slot: int, name: str, dtype: type) -> np.ndarray:
        return self._mailbox.area(slot, name).view(dtype)  # type: ignore[arg-type]

    def _check(self, outcome: str) -> None:
        if outcome != "ready":
            with contextlib.suppress(Exception):
                for slot in range(SLOTS):
                    self._mailbox.cancel(slot)
            raise AssistError(f"the GPU engine did not do its part: {outcome}")
