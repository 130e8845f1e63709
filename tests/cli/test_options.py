"""Groups of options: declared once, spread over commands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dualpace.cli.main import app
from dualpace.cli.options import EngineFlags, require_writable, takes_options
from dualpace.core.config import EngineOptions
from dualpace.core.errors import ConfigError


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1)] = 3
    unit: str = "m"


@dataclass(frozen=True)
class Weight:
    unit: str = "kg"
    heavy: bool = False


def run(*arguments: str) -> list[str]:
    seen: list[object] = []

    @takes_options
    def command(name: str, weight: Weight, size: Size, count: int = 1) -> None:
        """Take it."""
        seen.extend((name, weight, size, count))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    return [str(each) for each in seen] if result.exit_code == 0 else [result.output]


def test_the_fields_of_a_group_are_options_of_the_command() -> None:
    assert run("x", "--width", "7", "--heavy", "--count", "2") == [
        "x", "Weight(unit='kg', heavy=True)", "Size(width=7, unit='kg')", "2",
    ]  # fmt: skip
    assert "--width" in run("x", "--width", "0")[0]


def test_a_name_that_groups_share_is_one_option_for_both() -> None:
    assert run("x", "--unit", "lb")[1:3] == [
        "Weight(unit='lb', heavy=False)", "Size(width=3, unit='lb')",
    ]  # fmt: skip


def test_engine_flags_cover_every_engine_option_with_its_default() -> None:
    assert EngineFlags().options("m") == EngineOptions(model="m")
    assert {*vars(EngineFlags()), "model"} == set(EngineOptions.__struct_fields__)


@pytest.mark.parametrize("name", ["", "missing/report.json"])
def test_a_file_that_cannot_be_written_is_named_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .* folder"):
        require_writable(tmp_path / name)


def test_a_file_that_may_not_be_written_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "report.json"
    there.touch()
    require_writable(there)
    monkeypatch.setattr(os, "access", lambda path, mode: path not in (there, tmp_path))  # as a user
    for name in ("report.json", "other.json"):
        with pytest.raises(ConfigError, match="not allowed"):
            require_writable(tmp_path / name)


def test_help_cuts_no_name_short_on_a_narrow_terminal() -> None:
    result = CliRunner().invoke(app, ["bench", "offline", "--help"], env={"COLUMNS": "80"})
    words = result.output.split()
    for option in ("--max-num-batched-tokens", "--no-async-scheduling", "--gpu-memory-utilization"):
        assert option in words


@pytest.mark.parametrize("name", ["chart", "chart.json", "chart.gif"])
def test_a_figure_is_of_a_kind_that_can_be_drawn(tmp_path: Path, name: str) -> None:
    require_writable(None, figure=tmp_path / "chart.SVG")
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        require_writable(figure=tmp_path / name)
