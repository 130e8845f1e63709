"""Sends a load at its arrival times and keeps a record of each request: the clock of a benchmark.

Knows neither HTTP nor engines: what becomes of a request is its `Send`'s to find out. No limit but
the one that is asked for: what waits, waits in the server, where it is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import RequestRecord
from dualpace.core.errors import DualPaceError

PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests sent, finished and failed (of those finished) so far, and tokens received."""

    sent: int
    finished: int
    failed: int
    tokens: int


class Tally:
    """The replay's clock, and counts for the progress callback.

    start: the moment of `time.perf_counter` that is second 0. The callback is called at most every
    PROGRESS_INTERVAL_S, and at the end of each request.
    """

    def __init__(self, start: float, callback: Callable[[Progress], None] | None) -> None:
        self.sent = self.finished = self.failed = self.tokens = 0
        self._start = start
        self._callback = callback
        self._next_s = 0.0

    def now(self) -> float:
        """Seconds since the start of the replay."""
        return time.perf_counter() - self._start

    def add_tokens(self, count: int, now: float) -> None:
        self.tokens += count
        if now >= self._next_s:
            self._report(now)

    def finish(self, record: RequestRecord) -> None:
        self.finished += 1
        self.failed += not record.ok
        self._report(record.end_s)

    def _report(self, now: float) -> None:
        self._next_s = now + PROGRESS_INTERVAL_S
        if self._callback:
            self._callback(Progress(self.sent, self.finished, self.failed, self.tokens))


# Sends request `index` of the load, fills the record's chunks and finish reason and tells the tally
# of its tokens. Raises a `DualPaceError` where the request fails.
Send = Callable[[int, RequestRecord, Tally], Awaitable[None]]


class Course(TypedDict, total=False):
    """Options of `replay`, for those who hand them on to it."""

    max_concurrency: int | None
    seconds: float | None
    stop: asyncio.Event | None
    on_progress: Callable[[Progress], None] | None


async def replay(
    load: Sequence[LoadRequest],
    send: Send,
    *,
    max_concurrency: int | None = None,
    seconds: float | None = None,
    stop: asyncio.Event | None = None,
    start: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[RequestRecord]:
    """Send every request at its arrival time; a record of each that was sent, in `load`'s order.

    At most `max_concurrency` are in flight. After `seconds`, or once `stop` is set, nothing more is
    sent, and what is in flight is cut off. A failing request never stops the others. start: the
    moment of `time.perf_counter` that is second 0, by default now.
    """
    tally = Tally(time.perf_counter() if start is None else start, on_progress)
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    records: list[RequestRecord | None] = [None] * len(load)

    async def one(index: int) -> None:
        asked = load[index]
        await asyncio.sleep(asked.arrival_s - tally.now())
        async with gate:
            record = RequestRecord(
                asked,
                sent_s=tally.now(),
                end_s=0.0,
                prompt_tokens=asked.prompt_tokens,
                cut=True,
                index=index,
            )
            records[index] = record
            tally.sent += 1
            try:
                await send(index, record, tally)
                record.cut = False
            except DualPaceError as error:
                record.error = str(error) or type(error).__name__
                record.cut = False
            finally:
                record.end_s = tally.now()
        tally.finish(record)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(len(load))]
        if seconds is not None or stop is not None:
            left = None if seconds is None else seconds - tally.now()
            ending = group.create_task(_end(tasks, left, stop or asyncio.Event()))
            await asyncio.wait(tasks)
            ending.cancel()
    return [record for record in records if record is not None]


async def _end(
    tasks: Sequence[asyncio.Task[None]], seconds: float | None, stop: asyncio.Event
) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    for task in tasks:
        task.cancel()
