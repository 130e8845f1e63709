"""Replays on simulated hardware: the benchmark's records, with times that can be worked out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dualpace.bench.load import LengthModel, LoadRequest, LogNormal, arrive_poisson
from dualpace.bench.metrics import summarize
from dualpace.cli.simulate import simulate
from dualpace.core.plan import Batch, BatchRow, CopyJob, Tier
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.cost_model import Operation, Point
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.surface import Estimate
from dualpace.profile.fingerprint import Fingerprint
from dualpace.profile.table import Profile, save
from dualpace.sim.hardware import MESSAGE_DELAY, Durations
from dualpace.sim.replay import replay
from dualpace.sim.world import World

PAGE_TOKENS = 16
PAGE_BYTES = 1000
SMALL = LengthModel(LogNormal(100, 120), LogNormal(30, 50), max_prompt=400, max_output=150)


class KnownCosts:
    """A cost model that is a formula; beyond 1000 tokens of context it is a guess."""

    def cpu_iteration(self, rows: int, context: int) -> Estimate:
        return Estimate(0.02 + 0.001 * rows + 1e-5 * context, context > 1000)

    def gpu_decode(self, rows: int, context: int) -> Estimate:
        return Estimate(0.004 + 1e-5 * rows + 1e-7 * context, context > 1000)

    def gpu_prefill(self, tokens: int, context: int) -> Estimate:
        return Estimate(0.003 + 1e-5 * tokens + 1e-7 * context, context > 1000)

    def cpu_attention(self, rows: int, context: int) -> Estimate:
        return Estimate(0.001 * rows + 1e-5 * context, context > 1000)

    def assist(self, rows: int, prefill_share: float, slots: int = 1) -> Estimate:
        return Estimate(0.02 * slots * (1 + prefill_share), False)

    def assist_stolen(
        self, rows: int, context: int, prefill_share: float, slots: int = 1
    ) -> Estimate:
        return Estimate(0.008 * slots * (1 + prefill_share), False)

    def covers(self, *operations: Operation) -> bool:
        return True


def durations() -> Durations:
    return Durations(KnownCosts(), PAGE_BYTES, copy_bandwidth=1e6)


def row(count: int, start: int, tier: Tier = "gpu") -> BatchRow:
    pages = list(range(-(-(start + count) // PAGE_TOKENS)))
    return BatchRow("r", [0] * count, start, pages, tier, True, DecodeParams())


def test_a_step_costs_one_pass_of_its_tokens_and_what_each_part_attends_to() -> None:
    known, times = KnownCosts(), durations()
    rows = (row(1, 99), row(1, 49), row(32, 64), row(8, 0), row(1, 40, "host"), row(1, 0))
    dense = known.gpu_prefill(2 + 32 + 8 + 1 + 1, 0).seconds
    attention = 1e-7 * (100 + 50) + 1e-7 * (64 + 40)  # of the decodes, and of what came before
    assert times.gpu_step(Batch(1, rows)) == pytest.approx(dense + attention)
    times = durations()
    assert times.gpu_step(Batch(1, rows[:2])) == known.gpu_decode(2, 150).seconds
    assert times.cpu_step(Batch(1, (row(1, 9), row(1, 19)))) == known.cpu_iteration(2, 30).seconds
    assert times.copy(CopyJob(1, "r", "load", [1, 2, 3], [4, 5, 6])) == pytest.approx(0.003)
    assert (times.steps, times.extrapolated) == (2, 0)
    times.cpu_step(Batch(2, (row(1, 1999),)))
    assert (times.steps, times.extrapolated) == (3, 1)


def test_a_chunk_of_a_gated_step_attends_to_what_was_computed_before() -> None:
    known = KnownCosts()

    def step(start: int) -> float:
        rows = (row(32, start), row(1, 99, "host"))
        return durations().gpu_step(Batch(1, rows, second_half=1))

    earlier = known.gpu_prefill(32, 64).seconds - known.gpu_prefill(32, 0).seconds
    assert step(64) == pytest.approx(step(0) + earlier)


def test_an_assisted_iteration_takes_its_share_from_the_gpu_and_no_more() -> None:
    known, times = KnownCosts(), durations()
    host = Batch(1, tuple(row(1, 99, "host") for _ in range(10)), "assist")
    alone = known.gpu_decode(1, 100).seconds
    seconds = times.cpu_step(host)
    assert seconds == pytest.approx(0.01 + 1e-5 * 1000 + 0.02)
    decode = Batch(1, (row(1, 99),))
    steps = [times.gpu_step(decode) for _ in range(12)]
    share = 0.008 / seconds
    assert steps[0] == pytest.approx(alone / (1 - share))
    assert sum(steps) - 12 * alone == pytest.approx(0.008)  # paid within the iteration
    assert steps[-1] == pytest.approx(alone)


def test_a_prompt_loses_what_assists_take_from_prompts() -> None:
    known, times = KnownCosts(), durations()
    times.cpu_step(Batch(1, tuple(row(1, 99, "host") for _ in range(10)), "assist"))
    # Beside prompts an iteration takes 0.01 + 0.01 + 0.04 s, of which 0.016 are the GPU's.
    prompt = times.gpu_step(Batch(1, (row(32, 0),)))
    assert prompt == pytest.approx(known.gpu_prefill(32, 0).seconds / (1 - 0.016 / 0.06))


def test_a_lone_request_takes_its_prefill_its_decodes_and_two_messages() -> None:
    known = KnownCosts()
    hardware = durations().hardware(100, 0, PAGE_TOKENS)
    asked = LoadRequest(prompt_tokens=50, output_tokens=4, arrival_s=2.5)
    [record] = replay([asked], hardware, GpuOnlyPolicy())
    steps = [known.gpu_prefill(50, 0)] + [known.gpu_decode(1, 51 + i) for i in range(3)]
    ends = itertools.accumulate(step.seconds for step in steps)
    assert record.ok
    assert record.sent_s == 2.5
    assert [chunk.time_s for chunk in record.chunks] == pytest.approx(
        [2.5 + 2 * MESSAGE_DELAY + end for end in ends]
    )
    assert record.end_s == record.chunks[-1].time_s
    assert (record.finish_reason, record.output_tokens) == ("length", 4)


def test_every_request_gets_the_length_it_asked_for_on_both_engines() -> None:
    load = arrive_poisson(SMALL.generate(80, seed=1), rate=50.0, seed=1)
    hardware = durations().hardware(40, 400, PAGE_TOKENS)
    records = replay(load, hardware, DualPacePolicy(64))
    assert [record.request for record in records] == load
    summary = summarize(records)
    assert (summary.failed, summary.wrong_length) == (0, 0)
    assert summary.output_tokens == sum(request.output_tokens for request in load)
    assert set(summary.tokens_by_engine) == {"gpu", "cpu"}
    assert summary.send_lag_s.max == pytest.approx(0.0)


def test_arrival_order_is_by_time_and_not_by_place_in_the_load() -> None:
    early, late = LoadRequest(100, 20, 0.0), LoadRequest(100, 20, 0.001)
    hardware = durations().hardware(8, 0, PAGE_TOKENS)  # room for one
    second, first = replay([late, early], hardware, GpuOnlyPolicy())
    assert first.end_s < second.chunks[0].time_s


def test_a_request_that_fits_nowhere_is_reported_as_failed() -> None:
    hardware = durations().hardware(4, 0, PAGE_TOKENS)
    [small, large] = replay(
        [LoadRequest(8, 2), LoadRequest(500, 2, 1.0)], hardware, GpuOnlyPolicy()
    )
    assert small.ok
    assert not large.ok
    assert summarize([small, large]).failed == 1


def test_leaving_out_the_pages_contents_changes_no_time() -> None:
    def token_times(*, check_kv: bool) -> list[list[tuple[float, str]]]:
        hardware = durations().hardware(40, 400, PAGE_TOKENS)
        world = World(hardware, DualPacePolicy(16), max_rows=16, max_tokens=64, check_kv=check_kv)
        for arrival, asked in enumerate(SMALL.generate(30, seed=2)):
            params = DecodeParams(max_tokens=asked.output_tokens)
            prompt = [arrival] * asked.prompt_tokens
            world.submit(
                0.01 * arrival, RequestState(f"r{arrival}", arrival, 0, prompt, [], params)
            )
        world.run()
        world.check_integrity()
        return [
            [(time, engine) for _, time, engine in stream.tokens.values()]
            for stream in world.streams.values()
        ]

    assert token_times(check_kv=False) == token_times(check_kv=True)


@pytest.fixture
def profile_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    known = KnownCosts()
    points = [
        point
        for size in (1, 256)
        for context in (0, 16384)
        for point in (
            Point("cpu_iteration", size, context, known.cpu_iteration(size, context).seconds),
            Point("gpu_decode", size, context, known.gpu_decode(size, context).seconds),
            Point("gpu_prefill", size * 8, context, known.gpu_prefill(size * 8, context).seconds),
        )
    ]
    fingerprint = Fingerprint(
        cpu="CPU", cpu_cores=6, cpu_isa="avx2", device="GPU", driver="12.9", torch="2.13.0",
        dualpace="0.1.0", architecture="llama", vocab_size=100, hidden_size=64,
        intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        qkv_bias=False, qk_norm=False, tie_embeddings=True, dtype="bfloat16",
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES,
    )  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = Profile(
        model="m",
        date="2026-01-01T00:00:00+00:00",
        fingerprint=fingerprint,
        gpu_kv_tokens=4096,
        host_kv_tokens=65536,
        points=tuple(points),
    )
    return save(profile)


def test_the_command_prints_the_benchmarks_report_marked_as_simulated(
    profile_file: Path, tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(simulate)
    output = tmp_path / "report.json"
    common = ["--profile", str(profile_file), "--num-requests", "30", "--request-rate", "20"]
    result = CliRunner().invoke(app, [*common, "--json", str(output)])
    assert result.exit_code == 0, result.output
    assert "(simulated)" in result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert report["simulated"] is True
    assert report["succeeded"] == 30
    assert set(report["tokens_by_engine"]) == {"gpu", "cpu"}

    result = CliRunner().invoke(app, [*common, "--policy", "gpu-only", "--gpu-kv-tokens", "2048"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert set(report["tokens_by_engine"]) == {"gpu"}
    assert "clipped to 2048 tokens" in report["load"]

    for wrong in (
        ["--policy", "other"],
        ["--policy", "gated"],
        ["--what-if", "luck=2x"],
        ["--gpu-kv-tokens", "0", "--host-kv-tokens", "0"],
    ):
        result = CliRunner().invoke(app, [*common, *wrong])
        assert result.exit_code == 2
        assert "error: " in result.output


def test_a_closed_loop_sends_the_next_request_when_one_ends_and_ends_with_its_time() -> None:
    load = [LoadRequest(10, 5 + index % 7) for index in range(60)]
    hardware = durations().hardware(100, 0, PAGE_TOKENS)
    most = 4
    records = replay(load, hardware, GpuOnlyPolicy(), max_concurrency=most)
    moments = sorted(record.sent_s for record in records)
    assert all(
        sum(each.sent_s <= moment < each.end_s for each in records) == most
        for moment in moments[: -2 * most]
    )
    cut = replay(load, hardware, GpuOnlyPolicy(), max_concurrency=most, seconds=0.3)
    assert 0 < len(cut) < len(load)
    assert sum(record.cut for record in cut) == most
    assert all(record.ok for record in cut if record.end_s < 0.3 and not record.cut)
