"""`dualpace simulate` on the profiles that come along."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from dualpace.cli.simulate import simulate


def report(*arguments: str) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(simulate)
    result = CliRunner().invoke(app, ["rtx4090-llama-3.1-8b", "--num-requests", "120", *arguments])
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


def test_a_sweep_gives_the_rate_up_to_which_a_target_is_met() -> None:
    result = report("--policy", "gpu-only", "--rates", "1,3,9", "--target", "ttft_s.p99=4")
    p99 = [each["ttft_s"]["p99"] for each in result["sweep"]]
    assert all(each["simulated"] and each["host_kv_tokens"] == 0 for each in result["sweep"])
    found = result["sustainable"]
    assert found["rate"] == pytest.approx(np.interp(4.0, p99, [1.0, 3.0, 9.0]))
    assert found["verdict"] == "interpolated"


def test_a_faster_host_gives_more_and_a_hopeless_one_is_left_alone() -> None:
    plain = report()
    assert (
        report("--what-if", "host_bandwidth=2x")["output_tokens_per_s"]
        > (plain["output_tokens_per_s"])
    )
    crawling = ("--no-assist", "--what-if", "host_bandwidth=0.05x")
    assert report(*crawling)["tokens_by_engine"] == {"gpu": plain["output_tokens"]}
