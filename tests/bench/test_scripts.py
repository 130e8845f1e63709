"""The scripts in benchmarks/ tell what cannot work in a line, before anything is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """DualPace itself is only told of in the shell scripts."""
    command = [sys.executable] if script.endswith(".py") else ["sh"]
    return subprocess.run(
        [*command, str(BENCHMARKS / script), *map(str, arguments)],
        env={**os.environ, "DUALPACE": "echo"},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--json no/such/folder/{policy}.json", "is not a folder"),
        ("--rates 1,nan", "--rates"),
        ("--num-requests 0", "--num-requests"),
        ("--trace none.csv", "cannot read the trace none.csv"),
        ("--profile none", "no profile is called"),
        ("--host-kv 8GiB,0x", "host_kv=0x"),
        ("--profile h200-llama-3.1-70b --policies dualpace-local", "covers none of"),
    ],
)
def test_arguments_that_cannot_work_are_explained(arguments: str, message: str) -> None:
    ended = run("simulated_figures.py", *arguments.split())
    assert ended.returncode == 2
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_figures_are_simulated_into_a_file_for_each_policy(tmp_path: Path) -> None:
    ended = run(
        "simulated_figures.py", "--num-requests", 3, "--rates", "inf",
        "--policies", "gpu-only,dualpace", "--json", tmp_path / "{policy}.json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    written = [
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("gpu-only", "dualpace")
    ]
    both = json.loads(ended.stdout.splitlines()[-1])
    assert [each for sweep in written for each in sweep["sweep"]] == both["sweep"]


@pytest.mark.parametrize("script", ["paper_ratios.py", "shipped_profiles.py"])
def test_a_file_that_is_none_of_theirs_is_named(tmp_path: Path, script: str) -> None:
    file = tmp_path / "odd.json"
    reports = [
        {"ttft_s": {}, "model": "m", "label": "dualpace", "request_rate": rate}
        for rate in (1.0, 2.0)
    ]
    for content in (reports, {}, "x"):
        file.write_text(json.dumps(content))
        option = ["--h200-llama-3.1-8b"] if script == "shipped_profiles.py" else []
        ended = run(script, *option, file)
        assert ended.returncode == 2
        assert "odd.json" in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr


def test_a_series_begins_only_where_it_can_be_written_to_its_end(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.touch()
    for script, arguments, message in (
        ("closed_loop.sh", ("8b", tmp_path / "none.csv", tmp_path), "cannot read the trace"),
        ("closed_loop.sh", ("8b", trace, tmp_path / "none"), "not write into the folder"),
        ("rates.sh", ("8b", trace, tmp_path, "gpu-only:2", "dualpace"), "got dualpace"),
    ):
        ended = run(script, *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert message in ended.stderr
    runs = run("rates.sh", "8b", trace, tmp_path, "gpu-only:2", "dualpace:0.5").stdout.splitlines()
    assert [line.rsplit("/")[-1] for line in runs] == ["8b-gpu-only-2.json", "8b-dualpace-0.5.json"]
