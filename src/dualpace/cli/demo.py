"""`dualpace demo`: one question and one replay that show both engines at work, on any machine.

Starts a server of its own with a GPU pool so small that most requests live on the host, asks the
capital of France through the openai client, replays a small load and stops the server. Fails
loudly unless both engines produced tokens, every request succeeded and the answer names Paris.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

import httpx
from rich.console import Console
from rich.markup import escape

from dualpace.bench.client import ask_models, replay
from dualpace.bench.hardware import describe_machine
from dualpace.bench.load import AZURE_CONV_2023, LengthModel, draw_prompts
from dualpace.bench.metrics import Summary, summarize
from dualpace.bench.plots import plot_tokens
from dualpace.bench.provenance import describe_version
from dualpace.bench.report import Circumstances, report_table
from dualpace.cli.errors import explained
from dualpace.cli.replays import print_failures, progress_bar, today
from dualpace.core.errors import DualPaceError

MODEL = "smollm2"
GPU_KV_TOKENS = 1024
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
MAX_ANSWER_TOKENS = 48
NUM_REQUESTS = 48
MEAN_PROMPT_TOKENS = 90
MEAN_OUTPUT_TOKENS = 40
MAX_PROMPT_TOKENS = 256
MAX_OUTPUT_TOKENS = 96
VOCAB_SIZE = 32000
SEED = 0
FIGURE = Path("demo.png")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
LOG_LINES_SHOWN = 30


class DemoError(DualPaceError):
    """The demo did not show what it promises."""


def demo() -> None:
    """Start a server, ask it a question, replay a small load, and show what each engine did."""
    console = Console()
    with explained(prefix="The demo failed:"), _stop_on_signals():
        _run(console)


def server_command(port: int) -> list[str]:
    """The command line of the demo's server."""
    return [
        sys.executable, "-m", "dualpace.cli.main", "serve", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--gpu-kv-tokens", str(GPU_KV_TOKENS),
    ]  # fmt: skip


def demo_lengths() -> LengthModel:
    """The shape of Azure-conv 2023 at lengths that a small model decodes quickly on two cores."""
    prompt = AZURE_CONV_2023.prompt.scaled(MEAN_PROMPT_TOKENS / AZURE_CONV_2023.prompt.mean)
    output = AZURE_CONV_2023.output.scaled(MEAN_OUTPUT_TOKENS / AZURE_CONV_2023.output.mean)
    return LengthModel(prompt, output, MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS)


def _run(console: Console) -> None:
    port = _free_port()
    base_url = f"http://127.0.0.1:{port}"
    descriptor, name = tempfile.mkstemp(prefix="dualpace-demo-", suffix=".log")
    log = Path(name)
    console.print(
        f"Starting a server for {MODEL} with {GPU_KV_TOKENS} tokens of KV on the GPU: "
        "most requests will live on the host."
    )
    with os.fdopen(descriptor, "wb") as output, _server(console, port, output) as process:
        try:
            _await_ready(console, process, base_url, log)
            model = _served_model(base_url)
            answer = _ask(console, base_url, model)
            summary = _replay(console, base_url, model)
            _check(answer, summary)
        except DualPaceError:
            _show_log(console, log)
            raise
        except BaseException:
            log.unlink()
            raise
    log.unlink()
    console.print(f"[green]Both engines worked.[/] Figure: {FIGURE}")


def _await_ready(
    console: Console, process: subprocess.Popen[bytes], base_url: str, log: Path
) -> None:
    """Wait for /ready, showing the log's last line. Raises `DemoError` if it does not come."""
    start = time.monotonic()
    with console.status("starting the server") as status:
        while True:
            if process.poll() is not None:
                raise DemoError(
                    f"the server exited with status {process.returncode} before it was ready"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{base_url}/ready", timeout=5.0, trust_env=False).is_success:
                    return
            waited = time.monotonic() - start
            if waited > READY_TIMEOUT_S:
                raise DemoError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")
            last = (_log_lines(log) or [""])[-1]
            text = f"starting the server ({waited:.0f} s) {last}"
            status.update(escape(text[: console.width - 4]))
            time.sleep(0.2)


def _served_model(base_url: str) -> str:
    offered = ask_models(base_url)
    if not offered:
        raise DemoError("the server lists no model")
    return offered[0].id


def _ask(console: Console, base_url: str, model: str) -> str:
    """Put the question through the official client and print the answer as it streams."""
    import openai

    console.print(f"[bold]{QUESTION}[/]")
    parts: list[str] = []
    try:
        with openai.OpenAI(
            base_url=f"{base_url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=MAX_ANSWER_TOKENS,
                temperature=0.0,
                stream=True,
            )
            for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    parts.append(text)
                    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    except Exception as error:  # a broken stream surfaces as an error of the client's HTTP library
        raise DemoError(f"the question was not answered: {error}") from error
    finally:
        console.print()
    return "".join(parts)


def _replay(console: Console, base_url: str, model: str) -> Summary:
    """Replay the load, print the table, write the figure."""
    load = demo_lengths().generate(NUM_REQUESTS, SEED)
    prompts = draw_prompts(load, VOCAB_SIZE, SEED)
    with progress_bar(console, len(load)) as bar:
        records = asyncio.run(replay(base_url, model, load, prompts, on_progress=bar))
    summary = summarize(records)
    circumstances = Circumstances(
        model=model,
        base_url=base_url,
        hardware=describe_machine(),
        date=today(),
        load=f"{len(load)} requests at once, {GPU_KV_TOKENS} tokens of GPU KV",
        version=describe_version(),
    )
    print_failures(console, summary.failures)
    console.print(report_table(circumstances, summary))
    plot_tokens(FIGURE, records, circumstances)
    return summary


def _check(answer: str, summary: Summary) -> None:
    """Raise `DemoError` naming everything that did not go as promised."""
    problems = []
    if EXPECTED.lower() not in answer.lower():
        problems.append(f"the answer does not mention {EXPECTED}: {answer!r}")
    if summary.failed:
        problems.append(f"{summary.failed} of {summary.requests} requests failed")
    problems += [
        f"the {engine.upper()} engine produced no tokens"
        for engine in ("gpu", "cpu")
        if not summary.tokens_by_engine.get(engine)
    ]
    if problems:
        raise DemoError("; ".join(problems))


@contextlib.contextmanager
def _server(console: Console, port: int, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a child process that writes to `log`; gone when the block is left."""
    process = subprocess.Popen(
        server_command(port),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C in the terminal reaches the demo alone, which then stops
        # the server in order, instead of both at once.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with console.status("stopping the server"):
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, then SIGTERM, then SIGKILL for the server and whatever it left behind."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
    finally:  # also on a second Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP stop the demo as Ctrl-C does, so that no server is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _show_log(console: Console, log: Path) -> None:
    console.print(f"[bold]The server's last lines[/] ({log}):")
    for line in _log_lines(log)[-LOG_LINES_SHOWN:]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _log_lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
