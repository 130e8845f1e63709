"""The supervisor with engines that are small scripts: they answer, hang, die or fail to start."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpace import runtime, supervisor
from dualpace.core.errors import EngineError, HardwareError
from dualpace.core.messages import EngineReady, PeerDrained
from dualpace.runtime import RuntimeDirectory
from dualpace.supervisor import Launch, Supervisor, Timeouts

# Behaves as told by the word after its launch; "well" is to beat and answer for ever.
ENGINE = """
import os, sys, time
import msgspec
from dualpace.core.messages import EngineReady, PeerDown, PeerDrained, Shutdown
from dualpace.heartbeat import Heartbeat
from dualpace.ipc import EnginePort
from dualpace.supervisor import Launch
launch = msgspec.json.decode(sys.argv[1], type=Launch)
how, kv_tokens = sys.argv[2], int(sys.argv[3])
if how == "cannot start":
    sys.exit(3)
if how == "full disk":
    open(launch.error_file, "w").close()  # the file is there, but there is no room for text
    sys.exit(5)
if how == "loads for ever":
    time.sleep(1000)
port = EnginePort(launch.name, launch.address)
port.generation = launch.generation
port.connect("frontend", launch.frontend_address)
beat = Heartbeat(launch.heartbeat)
port.send("frontend", EngineReady(os.getpid(), kv_tokens, 32))
if how == "dies":
    port.close()
    sys.exit(4)
stopped = False
while not stopped:
    if how != "stuck loop":
        beat(7 if how == "stuck step" else 0)
    for envelope in port.drain():
        stopped = stopped or isinstance(envelope.body, Shutdown)
        if isinstance(envelope.body, PeerDown):
            port.send("frontend", PeerDrained(envelope.body.generation))
    port.wait(0.05)
"""


class Engines:
    """What each engine does, start by start (the last for ever), and what was heard."""

    def __init__(self, gpu: Sequence[str], cpu: Sequence[str], gpu_kv_tokens: int = 100) -> None:
        self.plans = {"gpu": list(gpu), "cpu": list(cpu)}
        self.kv_tokens = gpu_kv_tokens
        self.starts: list[str] = []
        self.heard: list[str] = []

    def command(self, launch: Launch) -> list[str]:
        plan = self.plans[launch.name]
        how = plan.pop(0) if len(plan) > 1 else plan[0]
        self.starts.append(launch.name)
        text = msgspec.json.encode(launch).decode()
        return [sys.executable, "-c", ENGINE, text, how, str(self.kv_tokens)]

    def run(self, scenario: Callable[[Supervisor], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            watched = Supervisor(self.command, (), 10, Timeouts(loop=1.0, step=1.0))
            watched.on_exit = lambda name: self.heard.append(f"{name} down")
            watched.on_hang = lambda name: self.heard.append(f"{name} hangs")
            watched.on_gpu_death = lambda reason: self.heard.append(reason)
            watched.on_host_gone = lambda: self.heard.append("host gone")

            async def listen() -> None:
                async for envelope in watched.port.envelopes():
                    match envelope.body:
                        case EngineReady() as ready:
                            watched.engine_ready(envelope.sender, ready)
                        case PeerDrained(generation):
                            watched.peer_drained(generation)

            inbox = asyncio.ensure_future(listen())
            try:
                async with asyncio.timeout(60):
                    await watched.start()
                    await scenario(watched)
            finally:
                inbox.cancel()
                await asyncio.wait({inbox})
                pids = list(watched.pids.values())
                await watched.close()
                assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
                assert not watched.runtime.path.exists()

        asyncio.run(main())

    async def until(self, *heard: str) -> None:
        while not set(heard) <= set(self.heard):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["stuck loop", "stuck step"])
def test_a_cpu_engine_that_hangs_is_replaced(how: str) -> None:
    engines = Engines(["well"], [how, "well"])

    async def scenario(watched: Supervisor) -> None:
        first = dict(watched.pids)
        await engines.until("cpu hangs", "cpu down")
        while watched.pids.get("cpu") in (None, first["cpu"]):
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)
        assert watched.pids["gpu"] == first["gpu"]

    engines.run(scenario)
    assert engines.heard == ["cpu hangs", "cpu down"]


def test_a_stopped_process_hangs_and_a_pause_of_all_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(["well"], ["well"])

    async def scenario(watched: Supervisor) -> None:
        for pid in watched.pids.values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3)  # this process does not run either
        for pid in watched.pids.values():
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1.5)
        assert engines.heard == []
        os.kill(watched.pids["cpu"], signal.SIGSTOP)
        await engines.until("cpu hangs", "cpu down")

    engines.run(scenario)


def test_a_gpu_engine_that_hangs_ends_every_stream_a_bounded_number_of_times() -> None:
    engines = Engines(["stuck loop"], ["well"])

    async def scenario(watched: Supervisor) -> None:
        with pytest.raises(EngineError, match=r"4 times: the gpu engine hung \(loop\)"):
            await watched.failed

    engines.run(scenario)
    assert engines.heard.count("the gpu engine hung (loop)") == 4


@pytest.mark.parametrize("how", ["dies", "cannot start"])
def test_quick_deaths_of_the_cpu_engine_slow_down_until_the_server_goes_on_without_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CPU_QUICK_DEATHS", 2)
    monkeypatch.setattr(supervisor, "CPU_RETRY", 1.0)
    engines = Engines(["well"], ["well", how, how, how, "well"])

    async def scenario(watched: Supervisor) -> None:
        first = dict(watched.pids)
        os.kill(first["cpu"], signal.SIGKILL)
        await engines.until("host gone")
        gone = time.monotonic()
        while len(engines.starts) < 6:
            await asyncio.sleep(0.02)
        assert time.monotonic() - gone > 0.9
        await asyncio.sleep(0.5)
        assert watched.pids.keys() == {"gpu", "cpu"}
        assert watched.pids["gpu"] == first["gpu"]
        assert not watched.failed.done()

    engines.run(scenario)


def test_without_kv_on_the_gpu_there_is_no_going_on_without_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "CPU_QUICK_DEATHS", 1)
    engines = Engines(["well"], ["dies"], gpu_kv_tokens=0)

    async def scenario(watched: Supervisor) -> None:
        with pytest.raises(EngineError, match="holds no KV"):
            await watched.failed

    engines.run(scenario)


@pytest.mark.parametrize("how", ["loads for ever", "cannot start"])
@pytest.mark.parametrize("gpu_kv_tokens", [100, 0])
def test_a_cpu_engine_that_does_not_come_back_with_the_gpu_engine_is_not_waited_for(
    how: str, gpu_kv_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless only the host has room for requests. It is tried again either way."""
    monkeypatch.setattr(supervisor, "LOADING", (2.0, 0.0))
    engines = Engines(["well"], ["well", how, "well"], gpu_kv_tokens)

    async def scenario(watched: Supervisor) -> None:
        os.kill(watched.pids["gpu"], signal.SIGKILL)
        if gpu_kv_tokens:
            await engines.until("host gone")
        while len(engines.starts) < 5:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)  # the last one is well, and no patience has run out on it
        assert watched.pids.keys() == {"gpu", "cpu"}
        assert not watched.failed.done()

    engines.run(scenario)
    assert engines.starts == ["gpu", "cpu", "gpu", "cpu", "cpu"]
    assert ("host gone" in engines.heard) == bool(gpu_kv_tokens)


def test_a_gpu_engine_that_does_not_end_loading_again_is_one_more_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "LOADING", (2.0, 0.0))
    engines = Engines(["well", "loads for ever", "well"], ["well"])

    async def scenario(watched: Supervisor) -> None:
        os.kill(watched.pids["gpu"], signal.SIGKILL)
        while engines.starts.count("gpu") < 3:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)
        assert watched.pids.keys() == {"gpu", "cpu"}
        assert not watched.failed.done()

    engines.run(scenario)
    assert sum("loading for 2 s" in heard for heard in engines.heard) == 1


def test_a_restarted_cpu_engine_may_load_as_long_as_the_first_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "LOADING", (0.0, 20.0))
    engines = Engines(["well"], ["well"])

    async def scenario(watched: Supervisor) -> None:
        first = watched.pids["cpu"]
        os.kill(first, signal.SIGKILL)
        await engines.until("cpu down")
        while watched.pids.get("cpu") in (None, first):
            await asyncio.sleep(0.02)
        await asyncio.sleep(2)
        assert engines.starts == ["gpu", "cpu", "cpu"]

    engines.run(scenario)


def test_a_dead_servers_directory_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = RuntimeDirectory()
    dead = tmp_path / "dualpace-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "gpu-1.sock").touch()
    other = tmp_path / "dualpace-notes"
    other.mkdir()
    third = RuntimeDirectory()
    assert sorted(tmp_path.iterdir()) == sorted([alive.path, other, third.path])
    third.close()
    alive.close()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("trouble", ["no room for a file", "no room for a socket"])
def test_a_directory_that_takes_no_file_or_socket_is_not_left_behind(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)  # longer than a socket's path may be
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if trouble == "no room for a file":
        before = os.open

        def full(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, "No space left on device")
            return before(path, flags, *more, **named)

        monkeypatch.setattr(runtime.os, "open", full)
    engines = Engines(["well"], ["well"])

    async def nothing(watched: Supervisor) -> None:
        raise AssertionError

    with pytest.raises((HardwareError, OSError), match=r"File name too long|No space left"):
        engines.run(nothing)
    assert engines.starts == []
    assert not list(folder.iterdir())


def test_an_engine_that_could_not_write_its_reason_down_ended_with_its_code() -> None:
    engines = Engines(["well"], ["full disk"])

    async def nothing(watched: Supervisor) -> None:
        raise AssertionError

    with pytest.raises(EngineError, match="the cpu engine's process ended with code 5"):
        engines.run(nothing)
