"""The engines' processes: started, watched, restarted, and never left behind.

Knows command lines, exit codes, heartbeats and the order of recovery; not what an engine computes.
An engine that hangs is killed, and from there on it is one that has died. Each child inherits the
read end of a pipe, the lifeline, whose other end only this process holds: when this process goes,
however it goes, the children see the pipe close and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dualpace.core.errors import EngineError
from dualpace.core.messages import (
    CPU,
    FRONTEND,
    GPU,
    EngineName,
    EngineReady,
    HostGone,
    PeerDown,
    PeerUp,
    Shutdown,
)
from dualpace.heartbeat import Monitor, Silence
from dualpace.ipc import AsyncPort
from dualpace.runtime import RuntimeDirectory

logger = logging.getLogger(__name__)
GPU_RESTARTS = 3  # restarts of everything before giving up …
GPU_RESTART_WINDOW = 600.0  # … within so many seconds
BACKOFF = (0.1, 30.0)  # first and longest pause before a CPU engine is restarted, seconds
QUICK_DEATH = 60.0  # a CPU engine that has answered for fewer seconds has died quickly
CPU_QUICK_DEATHS = 6  # in a row, after which the server goes on without it …
CPU_RETRY = 300.0  # … and tries again only every so many seconds
LOADING = (120.0, 3.0)  # seconds, or times its longest yet, that a restarted engine may load for
SHUTDOWN_PATIENCE = 5.0  # seconds for an engine to exit on request before it is killed
HEARTBEAT_CHECK = 1.0  # seconds between two looks at a heartbeat
LAST_LOOK = 0.5  # seconds for an engine that hangs to write down where


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds after which an engine hangs: a turn of its loop, and one step or copy."""

    loop: float
    step: float


class Launch(msgspec.Struct, frozen=True):
    """Who an engine's process is, and where it finds the others.

    lifeline: file descriptor of the pipe that closes when this process goes; heartbeat: of the page
    for its signs of life; error_file: where, in the runtime directory, it leaves its reason if it
    cannot go on.
    """

    name: EngineName
    generation: int
    address: str
    frontend_address: str
    gpu_address: str
    lifeline: int
    heartbeat: int
    error_file: str


class Child:
    """One engine process of one incarnation."""

    def __init__(
        self, launch: Launch, process: asyncio.subprocess.Process, monitor: Monitor
    ) -> None:
        self.name = launch.name
        self.launch = launch
        self.process = process
        self.monitor = monitor
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self.started_at = time.monotonic()
        self.ready_at = float("inf")
        self.hung: Silence | None = None

    def last_words(self) -> str:
        """Why it ended, in its own words if it left any."""
        if self.hung is not None:
            return f"the {self.name} engine hung ({self.hung})"
        words = ""
        with contextlib.suppress(OSError):
            words = Path(self.launch.error_file).read_text().strip()
        ended = f"the {self.name} engine's process ended with code {self.process.returncode}"
        return words or ended

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Supervisor:
    """Runs the engines; `command` makes the command line of a process from its `Launch`.

    `on_exit(name)` is called when an engine has died, `on_hang(name)` before that if it was killed
    because it hung, `on_gpu_death(reason)` when a death ends every stream, `on_host_gone()` when
    the server goes on without a CPU engine. `failed` gets an exception when there is nothing more
    to try. Raises `HardwareError` where the runtime directory takes no socket.
    """

    def __init__(
        self,
        command: Callable[[Launch], Sequence[str]],
        pass_fds: Sequence[int],
        host_pages: int,
        timeouts: Timeouts,
    ) -> None:
        self.runtime = RuntimeDirectory()
        try:
            self.port = AsyncPort(FRONTEND, self._address(FRONTEND))
        except BaseException:
            self.runtime.close()
            raise
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_exit: Callable[[EngineName], None] = lambda name: None
        self.on_hang: Callable[[EngineName], None] = lambda name: None
        self.on_gpu_death: Callable[[str], None] = lambda reason: None
        self.on_host_gone: Callable[[], None] = lambda: None
        self._command = command
        self._pass_fds = tuple(pass_fds)
        self._host_pages = host_pages
        self._timeouts = timeouts
        self._generation = 0
        self._gpu_address = ""
        self._children: dict[EngineName, Child] = {}
        self._lifeline = os.pipe()
        self._watchers: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self._gpu_deaths: list[float] = []
        self._cpu_deaths = 0  # quick ones, in a row
        self._loading: dict[EngineName, float] = {}  # the longest yet, seconds
        self._closing = False

    @property
    def pids(self) -> dict[EngineName, int]:
        """Process ids of the engines that run now."""
        return {name: child.process.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Start the engines and wait until they answer. Raises `EngineError` with the reason."""
        await self._spawn_all()
        for child in self._children.values():
            await self._until_ready(child)
        self._introduce()
        for child in self._children.values():
            self._watch(self._watch_child(child))

    def engine_ready(self, sender: str, ready: EngineReady) -> bool:
        """An engine's first message has come; False if its process has been replaced since."""
        for name, child in self._children.items():
            if name == sender and child.process.pid == ready.pid:
                if not child.ready.done():
                    child.ready.set_result(ready)
                    child.ready_at = time.monotonic()
                    loading = child.ready_at - child.started_at
                    self._loading[name] = max(self._loading.get(name, 0.0), loading)
                return True
        return False

    def peer_drained(self, generation: int) -> None:
        """The GPU engine no longer touches the dead CPU engine's pages."""
        if generation == self._generation and self._drained and not self._drained.done():
            self._drained.set_result(None)

    async def close(self) -> None:
        """Stop the engines, whatever they do, and remove the runtime directory."""
        self._closing = True
        await self._end_watchers()
        for child in self._children.values():
            if child.ready.done():
                self.port.send(child.name, Shutdown())
            else:
                child.kill()  # it reads no messages before it has loaded its weights
        for child in list(self._children.values()):
            await self._reap(child)
        self.port.close()
        for end in self._lifeline:
            os.close(end)
        self.runtime.close()

    # -- processes -------------------------------------------------------------------------------

    async def _spawn_all(self) -> None:
        self._generation += 1
        self._gpu_address = self._address(f"{GPU}-{self._generation}")
        await self._spawn(GPU)
        if self._host_pages:
            await self._spawn(CPU)

    async def _spawn(self, name: EngineName) -> Child:
        address = self._gpu_address if name == GPU else self._address(f"{CPU}-{self._generation}")
        check = self._check_interval
        monitor = Monitor(self._timeouts.loop, self._timeouts.step, max_gap=2 * check)
        launch = Launch(
            name=name,
            generation=self._generation,
            address=address,
            frontend_address=self._address(FRONTEND),
            gpu_address=self._gpu_address,
            lifeline=self._lifeline[0],
            heartbeat=monitor.descriptor,
            error_file=str(self.runtime.path / f"{name}-{self._generation}.error"),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(launch),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(self._lifeline[0], monitor.descriptor, *self._pass_fds),
                # A Ctrl-C at the terminal reaches this process alone, which then stops the engines.
                start_new_session=True,
            )
        finally:
            monitor.close()
        child = self._children[name] = Child(launch, process, monitor)
        self.port.connect(name, address)
        return child

    async def _until_ready(self, child: Child) -> None:
        exited = asyncio.ensure_future(child.process.wait())
        either: set[asyncio.Future[Any]] = {exited, child.ready}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not child.ready.done():
            raise EngineError(child.last_words())

    async def _until_ready_again(self, child: Child) -> None:
        """The same for an engine that has been there before. One that loads for much longer than
        any before it will not come, and is killed."""
        least, times = LOADING
        patience = max(least, times * self._loading.get(child.name, 0.0))
        try:
            async with asyncio.timeout(patience):
                await self._until_ready(child)
        except TimeoutError:
            child.kill()
            await child.process.wait()
            reason = f"the {child.name} engine was killed: loading for {patience:.0f} s"
            raise EngineError(reason) from None

    def _address(self, name: str) -> str:
        return f"ipc://{self.runtime.path / name}.sock"

    async def _reap(self, child: Child) -> None:
        try:
            await asyncio.wait_for(child.process.wait(), SHUTDOWN_PATIENCE)
        except TimeoutError:
            child.kill()
            await child.process.wait()

    def _introduce(self) -> None:
        if CPU in self._children:
            address = self._children[CPU].launch.address
            self.port.send(GPU, PeerUp(self._generation, address, self._host_pages))

    # -- watching --------------------------------------------------------------------------------

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._until_failed(work))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _until_failed(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _end_watchers(self) -> None:
        """All but the caller: one may be in the middle of starting a CPU engine."""
        others = self._watchers - {asyncio.current_task()}
        for watcher in others:
            watcher.cancel()
        if others:
            await asyncio.wait(others)

    async def _watch_child(self, child: Child) -> None:
        heart = asyncio.ensure_future(self._watch_heart(child))
        try:
            code = await child.process.wait()
        finally:
            heart.cancel()
        if self._closing or self._children.get(child.name) is not child:
            return
        logger.error("the %s engine ended with code %s", child.name, code)
        self.on_exit(child.name)
        if child.name == CPU:
            await self._recover_cpu()
        else:
            await self._recover_gpu(child.last_words())

    @property
    def _check_interval(self) -> float:
        return min(HEARTBEAT_CHECK, self._timeouts.loop / 4)

    async def _watch_heart(self, child: Child) -> None:
        """Kill the engine if it hangs; what follows is the same as for a death."""
        while child.hung is None:
            await asyncio.sleep(self._check_interval)
            child.hung = child.monitor.check(time.monotonic())
        seconds = getattr(self._timeouts, child.hung)
        what = "its loop has not turned" if child.hung == "loop" else "a step has been under way"
        logger.error("the %s engine hangs: %s for %g s; killing it", child.name, what, seconds)
        self.on_hang(child.name)
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGUSR1)  # its stacks go to the log
        await asyncio.sleep(LAST_LOOK)
        child.kill()

    # -- recovery --------------------------------------------------------------------------------

    async def _recover_cpu(self, all_wait: bool = False) -> None:
        """The dead is reaped already. The GPU engine lets go of its pages before a new one maps
        them; requests are resubmitted meanwhile by whoever keeps the journal.

        all_wait: no request is taken until there is a CPU engine, or none to wait for.
        """
        ready = False
        while not ready:
            pause = self._pause_before_retry(self._children.pop(CPU, None))
            self.port.disconnect(CPU)
            self._drained = asyncio.get_running_loop().create_future()
            self.port.send(GPU, PeerDown(self._generation))
            await self._drained
            if self._cpu_deaths > CPU_QUICK_DEATHS or (all_wait and self._gpu_holds_kv):
                self._go_on_without_host(pause)
            await asyncio.sleep(pause)
            self._generation += 1
            try:
                ready = await self._cpu_is_up(await self._spawn(CPU))
            except OSError as error:  # no memory for one more process, say
                logger.error("the CPU engine could not be started: %s", error)

    async def _cpu_is_up(self, child: Child) -> bool:
        """Wait until a CPU engine answers, and let both know of each other."""
        try:
            await self._until_ready_again(child)
        except EngineError as error:
            logger.error("the CPU engine did not start: %s", error)
            self.on_exit(CPU)  # its first message may have come in between
            return False
        self._introduce()
        self._watch(self._watch_child(child))
        return True

    def _pause_before_retry(self, dead: Child | None) -> float:
        lived = 0.0 if dead is None else time.monotonic() - dead.ready_at
        self._cpu_deaths = 1 if lived >= QUICK_DEATH else self._cpu_deaths + 1
        if self._cpu_deaths > CPU_QUICK_DEATHS:
            return CPU_RETRY
        first, longest = BACKOFF
        return float(min(longest, first * 2 ** (self._cpu_deaths - 1)))

    @property
    def _gpu_holds_kv(self) -> bool:
        return self._children[GPU].ready.result().kv_tokens > 0

    def _go_on_without_host(self, pause: float) -> None:
        if not self._gpu_holds_kv:
            raise EngineError(
                f"the CPU engine died {self._cpu_deaths} times, and the GPU engine holds no KV"
            )
        logger.error(
            "the CPU engine did not come up or died, %d times in a row: going on without host KV; "
            "next try in %g s",
            self._cpu_deaths, pause,
        )  # fmt: skip
        self.port.send(GPU, HostGone())
        self.on_host_gone()

    async def _recover_gpu(self, reason: str) -> None:
        """Every stream is lost. Restart everything, a bounded number of times; a GPU engine that
        dies before it is ready again counts as well."""
        await self._end_watchers()
        while True:
            self.on_gpu_death(reason)
            now = time.monotonic()
            recent = [at for at in self._gpu_deaths if now - at < GPU_RESTART_WINDOW]
            self._gpu_deaths = [*recent, now]
            for child in self._children.values():
                child.kill()
            for child in self._children.values():
                await child.process.wait()
            self._children.clear()
            if len(self._gpu_deaths) > GPU_RESTARTS:
                raise EngineError(f"the engines died {len(self._gpu_deaths)} times: {reason}")
            try:
                await self._restart()
            except (EngineError, OSError) as error:
                reason = str(error)
                logger.error("the engines did not restart: %s", reason)
            else:
                return

    async def _restart(self) -> None:
        """Start the engines anew; returns when the GPU engine answers, which need not wait for the
        CPU engine."""
        await self._spawn_all()
        await self._until_ready_again(self._children[GPU])
        self._watch(self._watch_child(self._children[GPU]))
        if CPU in self._children:
            self._watch(self._join(self._children[CPU]))

    async def _join(self, child: Child) -> None:
        if not await self._cpu_is_up(child):
            await self._recover_cpu(all_wait=True)
