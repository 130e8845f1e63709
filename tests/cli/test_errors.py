"""What a command's end tells a shell: one rule for all commands."""

from __future__ import annotations

import asyncio

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
