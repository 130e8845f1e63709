"""Runs the fake server as a process of its own: it can then die like a real one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).with_name("fake_server.py")


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server() -> Iterator[str]:
    port = unused_port()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--port", str(port)], stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/v1/models", trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None, "the fake server did not start"
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A fake server for all tests; ask it for a model by manners (see fake_server.py)."""
    with running_server() as url:
        yield url


@pytest.fixture
def start_server() -> Iterator[Callable[[], str]]:
    """Starts a fake server that the test may kill; returns its URL."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(running_server())


@pytest.fixture
def dead_url() -> str:
    """A local address where nobody listens."""
    return f"http://127.0.0.1:{unused_port()}"


@pytest.fixture
def fake_command() -> Callable[..., Callable[[int], list[str]]]:
    """Builds a stand-in for the demo's `server_command` with the given extra flags."""
    return lambda *flags: lambda port: [sys.executable, str(SCRIPT), "--port", str(port), *flags]
