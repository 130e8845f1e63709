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
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dualpace.core.errors import EngineError
from dualpace.core.messages import (
    CPU,
    FRONTEND,
    GPU,
    AnyMessage,
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
BACKOFF = (0.1, 30.0)  # first and longest pause before a CPU engine is restarted, seconds
SHUTDOWN_PATIENCE = 5.0  # seconds for an engine to exit on request before it is killed


class Child:
    """One engine process of one incarnation."""

    def __init__(self, name: EngineName, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()


class Supervisor:
    """Runs the engines that `command(name, generation, runtime, lifeline)` starts.

    Callbacks: `on_gpu_death(reason)` when all streams are lost, `on_restart(name)` after each
    restart, `on_exit(name)` when an engine's process has ended.
    """

    def __init__(
        self,
        *,
        command: Callable[[EngineName, int, Path, int], Sequence[str]],
        pass_fds: Sequence[int],
        host_pages: int,
        on_gpu_death: Callable[[str], None],
        on_exit: Callable[[EngineName], None],
        on_restart: Callable[[EngineName], None],
    ) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="dualpace-"))
        self.port = AsyncPort(FRONTEND, socket_address(self.runtime, FRONTEND))
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._command = command
        self._pass_fds = tuple(pass_fds)
        self._host_pages = host_pages
        self._on_gpu_death = on_gpu_death
        self._on_exit = on_exit
        self._on_restart = on_restart
        self._generation = 0
        self._children: dict[EngineName, Child] = {}
        self._lifeline = os.pipe()
        self._watchers: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self._gpu_deaths: list[float] = []
        self._cpu_failures = 0
        self._closing = False

    async def start(self) -> None:
        """Start the engines and wait until they answer. Raises `EngineError` with the reason."""
        self._generation += 1
        names: list[EngineName] = [GPU, CPU] if self._host_pages else [GPU]
        for name in names:
            await self._spawn(name)
        for name in names:
            await self._until_ready(self._children[name])
        self._introduce()
        for name in names:
            self._watch(self._children[name])

    def engine_ready(self, sender: str, ready: EngineReady) -> None:
        """An engine's first message has come."""
        for name, child in self._children.items():
            if name == sender and child.process.pid == ready.pid and not child.ready.done():
                child.ready.set_result(ready)

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
            self._send(child.name, Shutdown())
        for child in list(self._children.values()):
            await self._reap(child)
        self.port.close()
        for end in self._lifeline:
            os.close(end)
        shutil.rmtree(self.runtime, ignore_errors=True)

    # -- processes -------------------------------------------------------------------------------

    async def _spawn(self, name: EngineName) -> None:
        argv = self._command(name, self._generation, self.runtime, self._lifeline[0])
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lifeline[0], *self._pass_fds),
            # A Ctrl-C at the terminal reaches this process alone, which then stops the engines.
            start_new_session=True,
        )
        self._children[name] = Child(name, process)
        self.port.connect(name, engine_address(self.runtime, name, self._generation))

    async def _until_ready(self, child: Child) -> None:
        exited = asyncio.ensure_future(child.process.wait())
        await asyncio.wait({exited, child.ready}, return_when=asyncio.FIRST_COMPLETED)
        if not child.ready.done():
            raise EngineError(self._last_words(child))
        exited.cancel()

    def _last_words(self, child: Child) -> str:
        """What the engine wrote about why it could not go on."""
        note = error_file(self.runtime, child.name)
        with contextlib.suppress(OSError):
            return note.read_text().strip()
        return f"the {child.name} engine exited with code {child.process.returncode}"

    async def _reap(self, child: Child) -> None:
        try:
            await asyncio.wait_for(child.process.wait(), SHUTDOWN_PATIENCE)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()

    def _introduce(self) -> None:
        if CPU in self._children:
            address = engine_address(self.runtime, CPU, self._generation)
            self._send(GPU, PeerUp(self._generation, address, self._host_pages))

    def _send(self, to: str, body: AnyMessage) -> None:
        self.port.send(to, body)

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
        self._on_exit(child.name)
        try:
            if child.name == CPU:
                await self._recover_cpu()
            else:
                await self._recover_gpu(self._last_words(child))
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _recover_cpu(self) -> None:
        """The dead is reaped already. The GPU engine lets go of its pages before a new one maps
        them; requests are resubmitted meanwhile by whoever keeps the journal."""
        first, longest = BACKOFF
        while not self._closing:
            self._children.pop(CPU, None)
            self.port.disconnect(CPU)
            self._drained = asyncio.get_running_loop().create_future()
            self._send(GPU, PeerDown(self._generation))
            await self._drained
            await asyncio.sleep(min(longest, first * 2**self._cpu_failures))
            self._generation += 1
            await self._spawn(CPU)
            child = self._children[CPU]
            try:
                await self._until_ready(child)
            except EngineError as error:
                self._cpu_failures += 1
                logger.error("the CPU engine did not restart: %s", error)
                continue
            self._cpu_failures = 0
            self._introduce()
            self._on_restart(CPU)
            self._watch(child)
            return

    async def _recover_gpu(self, reason: str) -> None:
        """Every stream is lost. Restart everything, a bounded number of times."""
        self._on_gpu_death(reason)
        now = time.monotonic()
        self._gpu_deaths = [at for at in self._gpu_deaths if now - at < GPU_RESTART_WINDOW] + [now]
        children, self._children = self._children, {}
        for child in children.values():
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
        if len(self._gpu_deaths) > GPU_RESTARTS:
            raise EngineError(f"the GPU engine died {len(self._gpu_deaths)} times: {reason}")
        await self.start()
        self._on_restart(GPU)


def engine_address(runtime: Path, name: EngineName, generation: int) -> str:
    """Where the engine of that incarnation listens."""
    return socket_address(runtime, f"{name}-{generation}")


def socket_address(runtime: Path, name: str) -> str:
    """The ZeroMQ address of a process."""
    return f"ipc://{runtime / name}.sock"


def error_file(runtime: Path, name: str) -> Path:
    """Where an engine that cannot start leaves its reason."""
    return runtime / f"{name}.error"


def engine_command(config_file: Path, name: EngineName, generation: int, lifeline: int) -> list[str]:
    """The command line of an engine process."""
    return [
        sys.executable, "-m", "dualpace.cli.engine", name,
        str(config_file), str(generation), str(lifeline),
    ]  # fmt: skip
