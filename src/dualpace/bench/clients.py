"""One load sent by several client processes, so that the client is not what is measured.

Each process is `client.replay` with every n-th request and with its part of the concurrency limit;
all go by one clock. Their records are merged as if one client had made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dualpace.bench.client import replay
from dualpace.bench.load import LoadRequest
from dualpace.bench.record import RequestRecord
from dualpace.bench.replay import Progress
from dualpace.core.errors import DualPaceError

# A streamed chunk took 160 µs of a client's CPU time with 4 streams at once and 31 with 256, on two
# cores of an Intel Xeon: with so many tokens a second a process is busy half of the time at most.
TOKENS_PER_S = 3000.0
MAX_CLIENTS = 16
LEAD_S = 0.05  # from the word to begin until second 0: all processes have heard it by then
EXIT_TIMEOUT_S = 5.0


class ClientError(DualPaceError):
    """A client process ended before its requests did."""


def default_clients(load: Sequence[LoadRequest]) -> int:
    """Processes for a load: as many as its tokens a second need, on a quarter of the cores.

    How fast requests that come all at once are answered is the server's to say: the cores decide.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // 4)
    seconds = max((request.arrival_s for request in load), default=0.0)
    tokens = sum(request.output_tokens for request in load)
    needed = math.ceil(tokens / (seconds * TOKENS_PER_S)) if seconds else cores
    return max(1, min(needed, cores, MAX_CLIENTS, len(load)))


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process is to do."""

    base_url: str
    model: str
    load: Sequence[LoadRequest]
    prompts: Sequence[list[int]]
    max_concurrency: int | None
    seconds: float | None
    silence_timeout_s: float


class Clients:
    """Replays loads against a server, by up to `count` processes at a time.

    There are fewer where requests, or the concurrency limit, do not go round. One client works in
    this very process. Of the last replay, `worked` is how many there were, and `busiest` the most
    CPU time that one of them took of its time: near 1 the client itself was too slow.
    """

    def __init__(
        self, count: int, base_url: str, model: str, silence_timeout_s: float = 600.0
    ) -> None:
        self.count = count
        self.worked = 0
        self.busiest = 0.0
        self._base_url = base_url
        self._model = model
        self._silence_timeout_s = silence_timeout_s

    async def __call__(
        self,
        load: Sequence[LoadRequest],
        prompts: Sequence[list[int]],
        *,
        max_concurrency: int | None = None,
        seconds: float | None = None,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestRecord]:
        """`client.replay`'s records. Raises `ClientError` where a process does not survive."""
        self.worked = count = max(1, min(self.count, len(load), max_concurrency or len(load)))
        shares = [
            _Share(
                self._base_url,
                self._model,
                load[part::count],
                prompts[part::count],
                max_concurrency and len(range(part, max_concurrency, count)),
                seconds,
                self._silence_timeout_s,
            )
            for part in range(count)
        ]
        if count == 1:
            records, self.busiest = await _replay(shares[0], stop=stop, on_progress=on_progress)
            return records
        with _processes(shares) as (processes, pipes):
            follower = _Follower(processes, pipes, on_progress)
            answers = await follower.follow(stop or asyncio.Event())
        self.busiest = max(busy for _, busy in answers)
        merged = itertools.chain.from_iterable(records for records, _ in answers)
        return sorted(merged, key=lambda record: record.index)


class _Follower:
    """The parent's side: begins and stops all processes together and takes what they send."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        pipes: Sequence[Connection],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._processes = processes
        self._pipes = pipes
        self._on_progress = on_progress
        self._progress = [Progress(0, 0, 0, 0)] * len(pipes)

    async def follow(self, stop: asyncio.Event) -> list[tuple[list[RequestRecord], float]]:
        """Records and busy part of each process."""
        everyone = range(len(self._pipes))
        for part in everyone:
            await self._receive(part)  # it is ready
        begin = time.perf_counter() + LEAD_S
        for pipe in self._pipes:
            pipe.send(begin)
        stopping = asyncio.create_task(self._stop(stop))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._take(part)) for part in everyone]
        except* ClientError as errors:
            raise errors.exceptions[0] from None
        finally:
            stopping.cancel()
        return [task.result() for task in tasks]

    async def _take(self, part: int) -> tuple[list[RequestRecord], float]:
        while isinstance(message := await self._receive(part), Progress):
            self._progress[part] = message
            if self._on_progress:
                columns = zip(*map(astuple, self._progress), strict=True)
                self._on_progress(Progress(*map(sum, columns)))
        records, busy = message
        for record in records:
            record.index = record.index * len(self._pipes) + part
        return records, busy

    async def _receive(self, part: int) -> Any:
        try:
            return await _receive(self._pipes[part])
        except (EOFError, OSError):
            process = self._processes[part]
            process.join(EXIT_TIMEOUT_S)
            raise ClientError(
                f"a client process ended early, with exit code {process.exitcode}"
            ) from None

    async def _stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has just ended
                pipe.send("stop")


@contextlib.contextmanager
def _processes(shares: Sequence[_Share]) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """A process for each share, and this side's ends of their pipes; gone at the end."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(theirs, share), daemon=True)
            pipes.append(ours)
            process.start()
            processes.append(process)
            theirs.close()  # or the end of the process would not be the end of the pipe
        yield processes, pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(EXIT_TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
                process.join()


def _work(pipe: Connection, share: _Share) -> None:
    """What a client process does. Signals are the parent's to handle: they often come to all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, EOFError):  # the parent has gone
        pipe.send(asyncio.run(_answer(pipe, share)))


async def _answer(pipe: Connection, share: _Share) -> tuple[list[RequestRecord], float]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:  # by the parent's word, or by its end
        loop.remove_reader(pipe.fileno())
        stop.set()

    async def begin() -> float:
        pipe.send("ready")
        moment: float = await _receive(pipe)
        loop.add_reader(pipe.fileno(), end)
        return moment

    return await _replay(share, begin=begin, stop=stop, on_progress=pipe.send)


async def _replay(
    share: _Share,
    *,
    begin: Callable[[], Awaitable[float]] | None = None,
    stop: asyncio.Event | None,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[list[RequestRecord], float]:
    """The records, and the part of the replay's time for which this process was busy."""
    start = cpu_start = 0.0

    async def start_clocks() -> float:
        nonlocal start, cpu_start
        start = await begin() if begin else time.perf_counter()
        cpu_start = time.process_time()
        return start

    records = await replay(
        share.base_url,
        share.model,
        share.load,
        share.prompts,
        begin=start_clocks,
        silence_timeout_s=share.silence_timeout_s,
        max_concurrency=share.max_concurrency,
        seconds=share.seconds,
        stop=stop,
        on_progress=on_progress,
    )
    return records, (time.process_time() - cpu_start) / (time.perf_counter() - start)


async def _receive(pipe: Connection) -> Any:
    """The next message. Raises EOFError where the other side is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()
