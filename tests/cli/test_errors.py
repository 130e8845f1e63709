"""What a command's end tells a shell: one rule for all commands."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest
import typer

from dualpace.bench.client import ServerError
from dualpace.cli.errors import explained
from dualpace.core.errors import (
    ConfigError,
    EngineError,
    HardwareError,
    ModelError,
    RequestError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--port"), 2),
        (ModelError("no such model"), 2),
        (HardwareError("no GPU"), 2),
        (RequestError("temperature"), 2),
        (EngineError("it died"), 1),
        (ServerError("no server"), 1),
        (OSError("disk full"), 1),
        (MemoryError("Unable to allocate 9 TiB"), 1),
        (KeyboardInterrupt(), 130),
        (asyncio.CancelledError(), 130),
    ],
)
def test_usage_is_2_failure_1_and_ctrl_c_130(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, explained():
        raise error
    assert ended.value.exit_code == code
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    assert (str(error) or "stopped") in told.err


def test_sigterm_is_as_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, explained():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_while_the_program_is_still_being_imported_is_130_too() -> None:
    """A module that interrupts in the place of one that the command line imports."""
    script = (
        "import sys, importlib.abc\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'dualpace.cli.serve': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from dualpace.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
