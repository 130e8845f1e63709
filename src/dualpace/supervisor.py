"""The engines' processes: started, watched, restarted, and never left behind.

Knows command lines, exit codes and the order of recovery; not what an engine computes. Each child
inherits the read end of a pipe, the lifeline, whose other end only this process holds: when this
process goes, however it goes, the children see the pipe close and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
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
    PeerDown,
    PeerUp,
    Shutdown,
)
from dualpace.ipc import AsyncPort

logger = logging.getLogger(__name__)
GPU_RESTARTS = 3  # restarts of everything before giving up …
GPU_RESTART_WINDOW = 600.0  # … within so many seconds
CPU_RESTARTS = 10  # attempts in a row to start a CPU engine that has died
BACKOFF = (0.1, 30.0)  # first and longest pause before a CPU engine is restarted, seconds
SHUTDOWN_PATIENCE = 5.0  # seconds for an engine to exit on request before it is killed


class Launch(msgspec.Struct, frozen=True):
    """Who an engine's process is, and where it finds the others.

    lifeline: file descriptor of the pipe that closes when this process goes; error_file: where the
    engine leaves its reason if it cannot go on.
    """

    name: EngineName
    generation: int
    address: str
    frontend_address: str
    gpu_address: str
    lifeline: int
    error_file: str


class Child:
    """One engine process of one incarnation."""

    def __init__(self, launch: Launch, process: asyncio.subprocess.Process) -> None:
        self.name = launch.name
        self.launch = launch
        self.process = process
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()

    def last_words(self) -> str:
        """Why it ended, in its own words if it left any."""
        with contextlib.suppress(OSError):
            return Path(self.launch.error_file).read_text().strip()
        return f"the {self.name} engine's process ended with code {self.process.returncode}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Supervisor:
    """Runs the engines; `command` makes the command line of a process from its `Launch`.

    `on_exit(name)` is called when an engine has died, `on_gpu_death(reason)` when that ends every
    stream. `failed` gets an exception when there is nothing more to try.
    """

    def __init__(
        self, command: Callable[[Launch], Sequence[str]], pass_fds: Sequence[int], host_pages: int
    ) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="dualpace-"))
        self.port = AsyncPort(FRONTEND, self._address(FRONTEND))
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_exit: Callable[[EngineName], None] = lambda name: None
        self.on_gpu_death: Callable[[str], None] = lambda reason: None
        self._command = command
        self._pass_fds = tuple(pass_fds)
        self._host_pages = host_pages
        self._generation = 0
        self._gpu_address = ""
        self._children: dict[EngineName, Child] = {}
        self._lifeline = os.pipe()
        self._watchers: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self._gpu_deaths: list[float] = []
        self._closing = False

    @property
    def pids(self) -> dict[EngineName, int]:
        """Process ids of the engines that run now."""
        return {name: child.process.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Start the engines and wait until they answer. Raises `EngineError` with the reason."""
        self._generation += 1
        self._gpu_address = self._address(f"{GPU}-{self._generation}")
        names: list[EngineName] = [GPU, CPU] if self._host_pages else [GPU]
        for name in names:
            await self._spawn(name)
        for name in names:
            await self._until_ready(self._children[name])
        self._introduce()
        for name in names:
            self._watch(self._children[name])

    def engine_ready(self, sender: str, ready: EngineReady) -> bool:
        """An engine's first message has come; False if its process has been replaced since."""
        for name, child in self._children.items():
            if name == sender and child.process.pid == ready.pid:
                if not child.ready.done():
                    child.ready.set_result(ready)
                return True
        return False

    def peer_drained(self, generation: int) -> None:
        """The GPU engine no longer touches the dead CPU engine's pages."""
        if generation == self._generation and self._drained and not self._drained.done():
            self._drained.set_result(None)

    async def close(self) -> None:
        """Stop the engines, whatever they do, and remove the runtime directory."""
        self._closing = True
        for watcher in self._watchers:
            watcher.cancel()
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
        shutil.rmtree(self.runtime, ignore_errors=True)

    # -- processes -------------------------------------------------------------------------------

    async def _spawn(self, name: EngineName) -> None:
        address = self._gpu_address if name == GPU else self._address(f"{CPU}-{self._generation}")
        launch = Launch(
            name=name,
            generation=self._generation,
            address=address,
            frontend_address=self._address(FRONTEND),
            gpu_address=self._gpu_address,
            lifeline=self._lifeline[0],
            error_file=str(self.runtime / f"{name}-{self._generation}.error"),
        )
        process = await asyncio.create_subprocess_exec(
            *self._command(launch),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lifeline[0], *self._pass_fds),
            # A Ctrl-C at the terminal reaches this process alone, which then stops the engines.
            start_new_session=True,
        )
        self._children[name] = Child(launch, process)
        self.port.connect(name, address)

    async def _until_ready(self, child: Child) -> None:
        exited = asyncio.ensure_future(child.process.wait())
        either: set[asyncio.Future[Any]] = {exited, child.ready}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not child.ready.done():
            raise EngineError(child.last_words())

    def _address(self, name: str) -> str:
        return f"ipc://{self.runtime / name}.sock"

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

    # -- recovery --------------------------------------------------------------------------------

    def _watch(self, child: Child) -> None:
        task = asyncio.ensure_future(self._watch_child(child))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watch_child(self, child: Child) -> None:
        code = await child.process.wait()
        if self._closing or self._children.get(child.name) is not child:
            return
        logger.error("the %s engine ended with code %s", child.name, code)
        self.on_exit(child.name)
        try:
            if child.name == CPU:
                await self._recover_cpu()
            else:
                await self._recover_gpu(child.last_words())
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _recover_cpu(self) -> None:
        """The dead is reaped already. The GPU engine lets go of its pages before a new one maps
        them; requests are resubmitted meanwhile by whoever keeps the journal."""
        pause, longest = BACKOFF
        for _ in range(CPU_RESTARTS):
            self._children.pop(CPU, None)
            self.port.disconnect(CPU)
            self._drained = asyncio.get_running_loop().create_future()
            self.port.send(GPU, PeerDown(self._generation))
            await self._drained
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)
            self._generation += 1
            await self._spawn(CPU)
            child = self._children[CPU]
            try:
                await self._until_ready(child)
            except EngineError as error:
                logger.error("the CPU engine did not restart: %s", error)
                continue
            self._introduce()
            self._watch(child)
            return
        raise EngineError(f"the CPU engine did not start in {CPU_RESTARTS} attempts")

    async def _recover_gpu(self, reason: str) -> None:
        """Every stream is lost. Restart everything, a bounded number of times; an engine that
        dies before all are ready again counts as well."""
        for watcher in self._watchers - {asyncio.current_task()}:
            watcher.cancel()  # it may be in the middle of restarting the CPU engine
        while True:
            self.on_gpu_death(reason)
            now = time.monotonic()
            recent = [at for at in self._gpu_deaths if now - at < GPU_RESTART_WINDOW]
            self._gpu_deaths = [*recent, now]
            children, self._children = self._children, {}
            for child in children.values():
                child.kill()
                await child.process.wait()
            if len(self._gpu_deaths) > GPU_RESTARTS:
                raise EngineError(f"the engines died {len(self._gpu_deaths)} times: {reason}")
            try:
                await self.start()
            except EngineError as error:
                reason = str(error)
                logger.error("the engines did not restart: %s", reason)
            else:
                return
