"""`dualpace serve` as a process: signals, streams, complaints, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest


@pytest.fixture
def command(tiny: Any) -> list[str]:
    return [
        sys.executable, "-m", "dualpace.cli.main", "serve", str(tiny.source.path),
        "--tokenizer", "smollm2", "--device", "cpu", "--host-kv-size", "64MiB",
        "--served-model-name", "tiny", "--port", "0",
    ]  # fmt: skip


def start(
    command: list[str], log: Path, word: str = "serving"
) -> tuple[subprocess.Popen[bytes], str]:
    """A server process and the address of which it says that word."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if word in line and "http://" in line:
                return process, line[line.index("http://") :].split()[0]
        time.sleep(0.1)
    process.kill()
    raise AssertionError(log.read_text())


def engines_of(parent: int) -> list[int]:
    """Process ids of the parent's children."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_server_however_it_ends(
    how: signal.Signals,
    stopped: int,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: Callable[[int], bool],
) -> None:
    """Not even an engine that is stopped, or a directory."""
    runtime = Path(tempfile.mkdtemp())  # short: a socket's path has 107 characters at most
    monkeypatch.setenv("TMPDIR", str(runtime))
    process, address = start(command, tmp_path / "log")
    engines = engines_of(process.pid)
    assert len(engines) == 2
    assert httpx.get(f"{address}/ready").status_code == 200
    for engine in engines[:stopped]:
        os.kill(engine, signal.SIGSTOP)
    process.send_signal(how)
    code = process.wait(30)
    assert code == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    deadline = time.monotonic() + 10
    while any(map(runs, engines)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, engines))
    runtime.rmdir()  # nothing is left in it


def test_a_second_signal_ends_streams_at_once_and_cleans_up_all_the_same(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp())  # short: a socket's path has 107 characters at most
    monkeypatch.setenv("TMPDIR", str(runtime))
    process, address = start(command, tmp_path / "log")
    body = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert "choices" in next(lines)
        process.send_signal(signal.SIGINT)
        while "stopping" not in (tmp_path / "log").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        last = [line for line in lines if line][-1]
    assert "shutting down" in last
    assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    runtime.rmdir()  # nothing is left in it


def test_a_stream_is_finished_also_where_every_process_is_told_to_stop(
    command: list[str], tmp_path: Path
) -> None:
    """As a service manager tells all processes of a unit."""
    process, address = start(command, tmp_path / "log")
    body = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert "choices" in next(lines)
        for pid in (*engines_of(process.pid), process.pid):
            os.kill(pid, signal.SIGTERM)
        *_, usage, end = [line for line in lines if line]
    assert '"completion_tokens":2000' in usage.replace(" ", "")
    assert end == "data: [DONE]"
    assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_server_answers_from_the_start_and_says_that_it_loads(
    command: list[str], tmp_path: Path
) -> None:
    process, address = start(command, tmp_path / "log", "listening")
    try:
        statuses: list[int] = []
        while not statuses or statuses[-1] != 200:
            statuses.append(httpx.get(f"{address}/ready").status_code)
            assert process.poll() is None
        assert statuses[0] == 503
        assert httpx.get(f"{address}/health").json()["status"] == "ok"
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_server_that_is_stopped_or_fails_while_it_loads_ends_and_says_why(
    damaged: Path, command: list[str], tmp_path: Path
) -> None:
    process, _ = start(command, tmp_path / "log", "listening")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    done = subprocess.run(
        [*command[:4], str(damaged), *command[5:]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr


def test_a_port_that_is_taken_is_told_before_anything_loads(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*command[:-1], str(port)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr
    assert "loading" not in done.stderr


def test_a_place_without_room_for_sockets_is_told_and_left_clean(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("x" * 100)  # a socket's path has 107 characters at most
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "File name too long" in done.stderr
    assert "TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(place.iterdir())


def test_a_server_whose_standard_streams_are_closed_serves(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "dualpace", *command[3:-1], str(port)]
    closed = ["bash", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "bash", *program]
    process = subprocess.Popen(closed)
    try:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
        deadline = time.monotonic() + 60
        answer = None
        while answer is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    url = f"http://127.0.0.1:{port}/v1/completions"
                    answer = httpx.post(url, json=body, timeout=30)
        assert answer is not None
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu-kv-tokens", "-1"], "--gpu-kv-tokens"),
        (["--host-kv-size", "lots"], "--host-kv-size"),
        (["--host-kv-size", "900TiB"], "host memory"),
        (["--device", "cuda"], "no NVIDIA GPU"),
        (["--policy", "fastest"], "dualpace"),
        (["--max-model-len", "999999"], "--max-model-len"),
        (["--cpu-cores", "4096"], "--cpu-cores"),
        (["--port", "70000"], "--port"),
        (["--gpu-kv-tokens", "0", "--host-kv-size", "0"], "no room for KV"),
        (["--gpu-kv-tokens", "99999999999"], "--gpu-kv-tokens"),
        (["--host-kv-size", "40"], "less than a page"),
        (["--host", "192.0.2.1"], "--host"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere"),
        (["--tokenizer", str(Path(__file__).parent)], "--tokenizer"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(
    arguments: list[str], complaint: str, command: list[str]
) -> None:
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert "engine: loading" not in done.stderr
