"""`dualpace simulate` on the profiles that come along."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from dualpace.bench.load import LoadRequest
from dualpace.bench.replay import Progress
from dualpace.cli.simulate import simulate
from dualpace.profile.fingerprint import STAND_IN
from dualpace.profile.shipped import open_profile
from dualpace.sim.machine import Machine


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(simulate)
    common = ["--profile", "rtx4090-llama-3.1-8b", "--num-requests", "120"]
    return CliRunner().invoke(app, [*common, *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_decoupled_scheduling_adds_most_and_stalls_no_stream() -> None:
    """Decoupled scheduling adds most, and lets no stream stand still as gating does."""
    gpu_only, gated, dualpace = (
        report("--policy", policy) for policy in ("gpu-only", "gated", "dualpace")
    )
    assert all("MODELLED" in each["profile_note"] for each in (gpu_only, gated, dualpace))
    rate = "output_tokens_per_s"
    assert max(gpu_only[rate], gated[rate]) < dualpace[rate]
    assert dualpace["itl_s"]["max"] < 2 < gated["itl_s"]["max"]
    assert dualpace["ttft_s"]["p99"] < gpu_only["ttft_s"]["p99"]


def test_a_step_is_as_long_as_the_server_makes_it_on_the_device_that_was_measured(
    tmp_path: Path,
) -> None:
    measured = open_profile("rtx4090-llama-3.1-8b")
    for device, tokens in ((STAND_IN, 256), (measured.fingerprint.device, 1024)):
        fingerprint = msgspec.structs.replace(measured.fingerprint, device=device)
        profile = msgspec.structs.replace(measured, fingerprint=fingerprint)
        path = tmp_path / f"{tokens}.json"
        path.write_bytes(msgspec.json.encode(profile))
        options = ("--profile", str(path), "--policy", "gpu-only")
        by_default = report(*options)
        assert (
            by_default["steps"] == report(*options, f"--max-num-batched-tokens={tokens}")["steps"]
        )
        assert by_default["steps"] != report(*options, "--max-num-batched-tokens=512")["steps"]


def test_a_sweep_gives_the_rate_up_to_which_a_target_is_met() -> None:
    result = report("--policy", "gpu-only", "--rates", "1,3,9", "--target", "ttft_s.p99=4")
    p99 = [each["ttft_s"]["p99"] for each in result["sweep"]]
    assert all(each["simulated"] and each["host_kv_tokens"] == 0 for each in result["sweep"])
    found = result["sustainable"]
    assert found["rate"] == pytest.approx(np.interp(4.0, p99, [1.0, 3.0, 9.0]))
    assert found["verdict"] == "interpolated"


def test_ctrl_c_keeps_the_rates_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(self: Machine, load: list[LoadRequest], *args: Any, **how: Any) -> Any:
        if load[-1].arrival_s < 1.0:
            raise KeyboardInterrupt
        return whole(self, load, *args, **how)

    whole = Machine.replay
    monkeypatch.setattr(Machine, "replay", replay)
    result = run("--policy", "gpu-only", "--rates", "3,9000")
    assert result.exit_code == 130
    [done] = json.loads(result.stdout.splitlines()[-1])["sweep"]
    assert (done["request_rate"], done["succeeded"]) == (3.0, 120)
    early = run("--policy", "gpu-only", "--rates", "9000,3")
    assert (early.exit_code, early.stdout) == (130, "")


def test_a_faster_host_gives_more_and_a_hopeless_one_is_left_alone() -> None:
    plain = report()
    assert (
        report("--what-if", "host_bandwidth=2x")["output_tokens_per_s"]
        > (plain["output_tokens_per_s"])
    )
    crawling = ("--no-assist", "--what-if", "host_bandwidth=0.05x")
    without_help = report(*crawling)
    assert without_help["tokens_by_engine"] == {"gpu": plain["output_tokens"]}
    assert (without_help["label"], without_help["policy"]) == ("dualpace", "gpu-only")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--cpu-itl-target", "0"),
        ("--cpu-itl-target", "-1"),
        ("--gpu-itl-target", "0"),
        ("--gpu-itl-target", "nan"),
        ("--policy", "fastest"),
    ],
)
def test_what_a_server_refuses_its_simulation_refuses(option: str, value: str) -> None:
    result = run(option, value)
    assert result.exit_code == 2
    assert option in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpu-kv-tokens", "99999999999999999999"),
        ("--host-kv-tokens", "99999999999999999999"),
        ("--copy-gbps", "0"),
        ("--copy-gbps", "nan"),
        ("--copy-gbps", "inf"),
        ("--copy-gbps", "1e-310"),
        ("--what-if", "gpu_kv=infx"),
        ("--what-if", "host_bandwidth=1e-320"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_the_option(option: str, value: str) -> None:
    result = run(option, value)
    assert result.exit_code == 2, result.output
    assert option in result.stderr


@pytest.mark.parametrize(
    ("policy", "rooms"),
    [
        ("dualpace", "set --gpu-kv-tokens or --host-kv-tokens"),
        ("gpu-only", "set --gpu-kv-tokens\n"),
        ("gated", "set --gpu-kv-tokens\n"),
    ],
)
def test_without_room_it_is_told_where_the_policy_could_use_some(policy: str, rooms: str) -> None:
    none = ("--gpu-kv-tokens", "0", "--host-kv-tokens", "0" if policy == "dualpace" else "4096")
    result = run("--policy", policy, *none)
    assert result.exit_code == 2, result.output
    assert rooms in result.stderr


def test_a_load_that_ends_before_the_window_is_told() -> None:
    result = run("--duration", "10", "--warmup-seconds", "1e6")
    assert "ran out before the window" in result.stderr
    assert "raise --num-requests" in result.stderr


def test_a_replay_tells_of_each_request_that_ends() -> None:
    heard: list[Progress] = []
    machine = Machine(open_profile("rtx4090-llama-3.1-8b"))
    load = [LoadRequest(100, 4)] * 3
    machine.replay(load, machine.policy("gpu-only"), 1024, on_progress=heard.append)
    assert [(each.finished, each.failed, each.tokens) for each in heard] == [
        (1, 0, 4), (2, 0, 8), (3, 0, 12),
    ]  # fmt: skip


def test_a_terminal_sees_how_far_it_is_and_a_file_does_not() -> None:
    assert "simulating" not in run().stderr
    ours, theirs = pty.openpty()
    command = ["simulate", "--profile", "rtx4090-llama-3.1-8b", "--num-requests", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dualpace.cli.main", *command],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # that is how a terminal ends
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert process.wait(60) == 0
    assert b"simulating" in shown
    assert b"/20" in shown
