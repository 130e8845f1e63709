"""The demo against a fake server: what it shows, and that it fails loudly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from dualpace.cli import demo

Command = Callable[[int], list[str]]


@pytest.fixture
def run_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_command: Callable[..., Command]
) -> Callable[..., Any]:
    """Runs the demo in an empty folder, with the fake server started with the given flags."""
    app = typer.Typer()
    app.command()(demo.demo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(demo, "NUM_REQUESTS", 6)

    def run(*flags: str) -> Any:
        monkeypatch.setattr(demo, "server_command", fake_command(*flags))
        return CliRunner().invoke(app, [])

    return run


def test_the_demo_answers_replays_draws_and_stops_its_server(
    run_demo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int | None] = []
    stop = demo._stop

    def watched_stop(process: Any) -> None:
        stop(process)
        stopped.append(process.returncode)

    monkeypatch.setattr(demo, "_stop", watched_stop)
    result = run_demo()
    assert result.exit_code == 0, result.output
    assert "It is Paris." in result.output
    assert "output tokens, cpu" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]
    assert len(stopped) == 1
    assert stopped[0] is not None
    assert stopped[0] != -9  # it left on its own when asked to


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--engines", "gpu"], ["the CPU engine produced no tokens"]),
        (
            ["--engines", "cpu", "--answer", "It is Rome."],
            ["the GPU engine produced no tokens", "does not mention Paris: 'It is Rome. '"],
        ),
        (["--refuse"], ["no weights here", "exited with status 1 before it was ready"]),
        (["--chat-exits"], ["the engine is on fire", "the question was not answered"]),
    ],
    ids=["one-engine", "wrong-answer", "no-start", "server-dies"],
)
def test_the_demo_fails_loudly(
    run_demo: Callable[..., Any], flags: list[str], messages: list[str]
) -> None:
    result = run_demo(*flags)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    for message in ["The demo failed:", *messages]:
        assert message in text


INTERRUPTED = """
import signal, typer
from dualpace.cli import demo

def command(port):
    print(port, flush=True)
    return {command!r} + ["--port", str(port), "--never-ready"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has it ignored
demo.server_command = command
typer.run(demo.demo)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server(
    fake_command: Callable[..., Command], tmp_path: Path, number: signal.Signals
) -> None:
    command = fake_command()(0)[:2]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(command=command)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = iter(process.stdout)
        port = next(int(line) for line in lines if line.strip().isdigit())
        while not answers(port):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        rest = "".join(lines)
    assert process.returncode == 130, rest
    assert "stopped" in rest
    assert not answers(port)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_demo_load_is_small_enough_for_two_cores() -> None:
    load = demo.demo_lengths().generate(10_000, seed=0)
    prompts = [request.prompt_tokens for request in load]
    outputs = [request.output_tokens for request in load]
    assert np.mean(prompts) == pytest.approx(90, rel=0.05)
    assert 30 < np.mean(outputs) < 40  # the clipped tail is missing
    assert max(prompts) + max(outputs) <= demo.GPU_KV_TOKENS // 2
