"""`bench serve` as a user runs it: outputs, exit codes, messages."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dualpace.bench.clients import Clients
from dualpace.bench.load import LoadRequest
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.report import write_csv
from dualpace.cli import bench as bench_module
from dualpace.cli.bench import bench_app

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def bench(url: str, *options: str) -> Any:
    return CliRunner().invoke(
        bench_app, ["serve", "--base-url", url, "--num-requests", "12", "--scale", "0.03", *options]
    )


def test_a_table_and_a_json_line_last_and_all_files(server_url: str, tmp_path: Path) -> None:
    report, rows, figure = (tmp_path / name for name in ("r.json", "r.csv", "r.png"))
    result = bench(
        server_url, "--json", str(report), "--csv", str(rows), "--plot", str(figure),
        "--hardware", "a slide rule",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == json.loads(report.read_text())
    assert (last["model"], last["hardware"], last["succeeded"]) == ("fake", "a slide rule", 12)
    assert sum(last["tokens_by_engine"].values()) == last["output_tokens"]
    assert "TTFT" in result.stdout
    with rows.open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["index"]) for line in lines] == [*range(12)]
    assert sum(int(line["output_tokens"]) for line in lines) == last["output_tokens"]
    assert sum(int(line["cpu_tokens"]) for line in lines) == last["tokens_by_engine"]["cpu"]
    assert figure.read_bytes().startswith(PNG_SIGNATURE)


def test_a_trace_is_replayed_at_a_rate(server_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,300,100\n2024-05-10 00:01:00.5+00:00,900,200\n"
    )
    result = bench(server_url, "--trace", str(trace), "--arrival", "trace", "--request-rate", "10")
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["load"] == "2 requests, azure.csv × 0.03, trace arrivals at 10/s"
    assert (last["prompt_tokens"], last["output_tokens"]) == (36, 9)


def test_a_sweep_is_one_report_for_each_rate_and_a_sustainable_rate(
    server_url: str, tmp_path: Path
) -> None:
    report, rows = tmp_path / "r.json", tmp_path / "r.csv"
    result = bench(
        server_url, "--rates", "50,100,inf", "--clients", "2", "--label", "fake",
        "--target", "ttft_s.p99=60,normalized_latency_s.mean=60",
        "--json", str(report), "--csv", str(rows),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == json.loads(report.read_text())
    assert [each["request_rate"] for each in last["sweep"]] == [50.0, 100.0, None]
    assert [each["succeeded"] for each in last["sweep"]] == [12, 12, 12]
    assert {(each["clients"], each["label"]) for each in last["sweep"]} == {(2, "fake")}
    assert all(each["client_busy"] > 0.0 for each in last["sweep"])
    assert (last["sustainable"]["rate"], last["sustainable"]["limit"]) == (100.0, None)
    assert "sustainable rate: 100/s or more" in result.stdout
    with rows.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["request_rate"] for line in lines] == ["50.0"] * 12 + ["100.0"] * 12 + [""] * 12
    for each in last["sweep"]:
        counts = each["timeline"]["tokens_by_engine"]
        assert {engine: sum(bins) for engine, bins in counts.items()} == each["tokens_by_engine"]


def test_lengths_are_clipped_to_what_the_server_tells(server_url: str) -> None:
    result = bench(server_url, "--scale", "1", "--num-requests", "4", "--max-concurrency", "2")
    last = json.loads(result.stdout.splitlines()[-1])
    assert "clipped to 512 tokens" in last["load"]
    assert last["prompt_tokens"] + last["output_tokens"] <= 4 * 512


def test_a_closed_loop_is_measured_in_a_window_after_a_warm_up(server_url: str) -> None:
    result = bench(
        server_url, "--num-requests", "3000", "--max-concurrency", "2", "--num-warmups", "2",
        "--warmup-seconds", "0.5", "--duration", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert "at most 2 in flight; 1 s after 0.5 s of warm-up" in last["load"]
    assert 0 < last["unfinished"] <= 2
    assert last["requests"] < 3000
    window = last["window"]
    assert window["start_s"] == 0.5
    assert window["end_s"] >= 1.5
    assert 0 < window["output_tokens"] <= last["output_tokens"] + last["unfinished_tokens"]
    assert 0 < window["requests"] <= last["requests"]


def test_a_load_that_runs_out_in_the_window_is_told(server_url: str) -> None:
    result = bench(server_url, "--duration", "60")
    assert result.exit_code == 0, result.output
    assert "raise --num-requests" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["window"]["end_s"] < 60.0


def test_partial_failure_is_shown_and_still_a_measurement(server_url: str) -> None:
    result = bench(server_url, "--model", "flaky")
    assert result.exit_code == 0
    assert "4 failed: HTTP 503: no room" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["failed"] == 4


@pytest.mark.parametrize("model", ["full", "cut"])
def test_no_success_at_all_is_exit_code_1(server_url: str, model: str) -> None:
    result = bench(server_url, "--model", model, "--scale", "1")  # long enough to be cut
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["succeeded"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arrival", "trace"], "--arrival trace needs --trace"),
        (["--arrival", "poisson"], "--arrival poisson needs a finite --request-rate"),
        (["--arrival", "inf", "--request-rate", "2"], "leave --request-rate or --rates out"),
        (["--arrival", "inf", "--rates", "2,4"], "leave --request-rate or --rates out"),
        (["--request-rate", "-1"], "--request-rate must be"),
        (["--request-rate", "-inf"], "--request-rate must be"),
        (["--request-rate", "nan"], "--request-rate must be"),
        (["--request-rate", "1e-300"], "raise --request-rate"),
        (["--rates", "1,1e-320"], "raise --request-rate or --rates"),
        (["--scale", "0"], "--scale must be"),
        (["--scale", "1e18"], "--scale must be"),
        (["--scale", "inf"], "--scale must be"),
        (["--num-requests", "99999999999999"], "--num-requests"),
        (["--duration", "inf"], "--duration"),
        (["--vocab-size", "99999999999999999999"], "--vocab-size"),
        (["--max-concurrency", "99999999999999999999"], "--max-concurrency"),
        (["--duration", "2", "--warmup-seconds", "inf"], "--warmup-seconds"),
        (["--trace", "none.csv"], "cannot read the trace none.csv"),
        (["--trace", "x.csv", "--synthetic"], "exclude each other"),
        (["--warmup-seconds", "2"], "--warmup-seconds needs --duration"),
        (["--rates", "1,x"], "--rates is numbers with commas"),
        (["--rates", "1,0"], "--rates must be"),
        (["--rates", "1,nan"], "--rates must be"),
        (["--rates", "1,2", "--request-rate", "3"], "exclude each other"),
        (["--rates", "1,2", "--plot", "x.png"], "--plot shows one replay"),
        (["--target", "ttft_s.p99=1", "--rates", "1,inf"], "--target needs --rates"),
        (["--target", "ttft=1", "--rates", "1,2"], "--target is METRIC.STATISTIC"),
        (["--json", "no/such/folder/r.json"], "is not a folder"),
        (["--json", "x", "--csv", "x"], "cannot write x for two options"),
    ],
)
def test_options_that_cannot_work_are_explained(
    server_url: str, options: list[str], message: str
) -> None:
    result = bench(server_url, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_full_disk_is_explained_and_loses_no_measurement(server_url: str) -> None:
    for option in ("--json", "--csv"):
        result = bench(server_url, option, "/dev/full")
        assert result.exit_code == 1
        assert "cannot write /dev/full: No space left on device" in result.stderr
        assert json.loads(result.stdout.splitlines()[-1])["succeeded"] > 0


def test_files_are_written_also_where_stdout_is_full(server_url: str, tmp_path: Path) -> None:
    report, rows = tmp_path / "r.json", tmp_path / "r.csv"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "dualpace", "bench", "serve", "--base-url", server_url,
             "--num-requests", "2", "--json", str(report), "--csv", str(rows)],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert json.loads(report.read_text())["succeeded"] == 2
    assert len(rows.read_text().splitlines()) == 3


def test_ctrl_c_in_a_warm_up_keeps_the_rates_before(
    server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rate's replay is over when the second one's warm-up is interrupted."""
    loads: list[int] = []

    class Impatient(Clients):
        async def __call__(self, load: Any, *args: Any, **how: Any) -> Any:
            loads.append(len(load))
            if loads == interrupted_at:
                os.kill(os.getpid(), signal.SIGTERM)
                await how["stop"].wait()
            return await super().__call__(load, *args, **how)

    monkeypatch.setattr(bench_module, "Clients", Impatient)
    report = tmp_path / "r.json"
    options = ["--rates", "50,100", "--clients", "1", "--json", str(report)]
    interrupted_at = [1]
    result = bench(server_url, *options)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "stopped" in result.stderr
    assert not report.exists()
    loads.clear()
    interrupted_at = [1, 12, 1]
    assert bench(server_url, *options).exit_code == 130
    assert [each["request_rate"] for each in json.loads(report.read_text())["sweep"]] == [50.0]
    assert loads == interrupted_at


def test_what_a_server_says_need_not_be_unicode(tmp_path: Path) -> None:
    records = [
        RequestRecord(LoadRequest(3, 1), 0.0, 1.0, 3, error="no \ud800"),
        RequestRecord(LoadRequest(3, 1), 0.0, 1.0, 3, [Chunk(1.0, 1, "\udfff")]),
    ]
    write_csv(tmp_path / "r.csv", [(None, records)])
    assert "no \\ud800" in (tmp_path / "r.csv").read_text()
    script = "from dualpace.cli.tables import table_console; table_console().print('\\ud800 ×')"
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.stdout == "\\ud800 \\xd7\n"


def test_an_unreachable_server_is_explained(dead_url: str) -> None:
    result = bench(dead_url)
    assert result.exit_code == 1
    assert f"no server answers at {dead_url}" in result.stderr
