"""One engine's steps beside what is measured of the other: they share cores and memory, or a GPU.

Knows no engine and nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from dualpace.core.plan import Batch, Executor
from dualpace.profile.probes import Room, make_batch, step_ends

DECODES = 32  # rows of the steps beside
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
        try:
            while len(self.times) < DEPTH and self.running:
                time.sleep(1e-3)
        except BaseException:  # Ctrl-C: nobody else would end them before the executor is closed
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        # An assist fails where the steps beside it do, and only these know why.
        if self.error is not None and (error is None or isinstance(error, Exception)):
            raise self.error

    @property
    def running(self) -> bool:
        """False once a step has failed."""
        return self._thread.is_alive()

    def _end(self) -> None:
        """Wait for what is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before = self._clock()
        try:
            for end in step_ends(
                self._executor, self._batch, DEPTH, self._clock, lambda _: self._stop.is_set()
            ):
                self.times.append(end - before)
                before = end
        except Exception as error:
            self.error = error


def decodes_in(room: Room) -> Batch | None:
    """Full seats, as nearly as the room allows it."""
    rows = min(DECODES, room.max_rows, room.pages)
    context = min(rows * 1024, rows * room.max_model_len, room.pages * room.page_tokens)
    while rows and context >= rows:
        if (batch := make_batch("gpu_decode", rows, context, room)) is not None:
            return batch
        context //= 2
    return None


@contextlib.contextmanager
def busy_beside(
    executor: Executor | None, room: Room, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Beside | None]:
    """With decodes of `executor` under way, up to `DECODES` of them, as far as its `room` goes;
    with nothing, None, where there is no such engine, or no room."""
    decodes = None if executor is None else decodes_in(room)
    if executor is None or decodes is None:
        yield None
        return
    with Beside(executor, decodes, clock) as beside:
        yield beside
