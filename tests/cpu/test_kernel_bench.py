"""The kernel benchmark: every case measured, plausible numbers, errors that a wrong kernel would
not have, and the command's JSON. How fast anything is, no test can say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from dualpace.cli.main import app
from dualpace.core.errors import ConfigError
from dualpace.cpu import _native, kernel_bench
from dualpace.cpu.kernel_bench import BATCHES, GROUPS, KernelBench, KernelReport
from dualpace.profile.torch_linear import TorchLinear

MIB = 2**20
BFLOAT16_ERROR = 5e-3  # rounding of activations, probabilities and results to 8 bits


@pytest.fixture
def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a run takes seconds."""
    monkeypatch.setattr(kernel_bench, "BATCHES", ((3, 64), (1, 4096)))
    monkeypatch.setattr(kernel_bench, "HIDDEN", 256)
    monkeypatch.setattr(kernel_bench, "INNER", 512)
    monkeypatch.setattr(kernel_bench, "VOCAB", 2048)
    monkeypatch.setattr(kernel_bench, "SETTLE_S", 0.0)


def measure(cores: list[int], *, quick: bool = True, **options) -> KernelReport:
    bench = KernelBench(cores, quick=quick, memory_bytes=64 * MIB, **options)
    bench.seconds_per_round = 0.01
    return bench.run()


@pytest.mark.usefixtures("small")
def test_every_case_is_measured_beside_its_memory_and_checked(cores) -> None:
    steps: list[tuple[int, int]] = []
    asked: list[tuple[int, int, int]] = []

    def torch_linear(n: int, k: int, m: int) -> tuple[float, None]:
        asked.append((n, k, m))
        return 0.5, None

    report = measure(
        cores,
        torch_linear=torch_linear,
        on_step=lambda what, done, total: steps.append((done, total)),
    )
    assert (report.isa, report.threads) == (_native.supported_isas()[-1], len(cores))
    cases = {(p.sequences, p.tokens, p.group) for p in report.attention}
    assert cases == {(*batch, group) for batch in kernel_bench.BATCHES for group in GROUPS}
    assert {p.m for p in report.linear} == {1, 16, 64, 256}
    for point in (*report.attention, *report.linear):
        assert point.gb_s / point.read_gb_s == pytest.approx(point.fraction)
        assert point.seconds > 0
        assert 0 < point.relative_l2 < BFLOAT16_ERROR
    compared = [p for p in report.linear if p.torch_eager_seconds is not None]
    assert len(compared) == len(asked) == 8
    assert {name.split("→")[0] for name in (p.layer for p in compared)} == {"256", "512"}
    for memory in (report.arena, report.weights):
        assert memory.size == 64 * MIB
        assert "pages" in memory.pages
        assert 0 < memory.read_gb_s_least <= memory.read_gb_s <= memory.read_gb_s_most
    assert all(other.seconds > 0 for other in report.other)
    assert report.barrier_seconds >= 0
    assert report.iteration is None
    assert any("8B" in note for note in report.notes)
    assert [done for done, _ in steps] == list(range(steps[0][1]))


@pytest.mark.usefixtures("small")
def test_a_full_run_ends_with_a_whole_iteration(cores, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dict(vocab_size=2048, hidden_size=256, intermediate_size=512, num_layers=2)
    heads = dict(num_heads=8, num_kv_heads=2, head_dim=32, inv_freq=(0.1,) * 16)
    spec = msgspec.structs.replace(kernel_bench.LLAMA_8B, **shape, **heads)
    monkeypatch.setattr(kernel_bench, "LLAMA_8B", spec)
    steps: list[tuple[int, int]] = []
    report = measure(
        cores, quick=False, on_step=lambda what, done, total: steps.append((done, total))
    )
    iteration = report.iteration
    assert iteration is not None
    assert (iteration.rows, iteration.tokens) == (32, 1024)
    assert iteration.kv_bytes == 32 * 1024 * 2 * 2 * 2 * 32 * 2
    layer = 256 * (2 * 256 + 2 * 64) + 3 * 256 * 512 + 2 * 256
    assert iteration.weight_bytes == 2 * (2 * layer + 2048 * 256 + 256)
    assert iteration.fraction == pytest.approx(iteration.roof_seconds / iteration.seconds)
    assert {point.m for point in report.linear} == {1, 8, 16, 32, 64, 128, 256}
    assert [done for done, _ in steps] == list(range(steps[0][1]))


def test_the_real_cases_are_those_of_the_design() -> None:
    assert [sequences * tokens for sequences, tokens in BATCHES] == [8192, 65536, 262144, 32768]
    assert GROUPS == (4, 8)


@pytest.mark.usefixtures("small")
def test_short_memory_is_said(cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "available_memory", lambda: 6 * kernel_bench.GIB)
    bench = KernelBench(cores, quick=False)
    assert bench.size < 4 * kernel_bench.GIB
    assert "memory is short" in bench.notes[0]


def test_a_wrong_instruction_set_is_the_users_error(cores) -> None:
    with pytest.raises(ConfigError, match="unknown instruction set"):
        KernelBench(cores, "mmx", memory_bytes=MIB)


def test_reading_and_filling_cover_all_of_the_memory(cores) -> None:
    engine = _native.Engine(cores)
    memory = _native.map_private(4 * MIB)
    for wide, least, most in ((True, 0.125, 2.0), (False, 2.0**-7, 2.0**-3)):
        _native.fill_bfloat16(engine, memory, wide)
        values = np.abs((memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        assert least <= values.min() < values.max() < most
        assert len(np.unique(memory.view(np.uint64))) > memory.nbytes / 8 * 0.999
    assert _native.time_read(engine, memory) > 0


@pytest.mark.usefixtures("small")
def test_the_command_prints_tables_and_json_last(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(KernelBench, "_choose_size", lambda self: 64 * MIB)
    file = tmp_path / "kernels.json"
    command = ["bench", "kernels", "--quick", "--no-torch", "--cpu-cores", "1"]
    result = CliRunner().invoke(app, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report == json.loads(file.read_text())
    assert report["threads"] == 1
    assert report["hardware"]
    assert {point["group"] for point in report["attention"]} == set(GROUPS)
    assert "of read" in result.stdout
    wrong = CliRunner().invoke(app, [*command, "--cpu-isa", "mmx"])
    assert wrong.exit_code == 2


def test_ctrl_c_ends_the_command_quietly_while_torch_is_asked(tmp_path) -> None:
    """A terminal sends the signal to every process that belongs to the command."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with (tmp_path / "log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dualpace.cli.main", "bench", "kernels", "--quick"],
                stdout=log,
                stderr=log,
                process_group=0,
            )
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while not (children.read_text() and _imports_torch(children.read_text().split()[0])):
                assert process.poll() is None
                time.sleep(0.02)
            torch_process = int(children.read_text().split()[0])
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(30) == 130
            log.seek(0)
            assert log.read().strip() == "stopped"
        assert not Path(f"/proc/{torch_process}").exists()
    finally:
        signal.signal(signal.SIGINT, before)


def _imports_torch(process: str) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


def test_torch_answers_from_a_process_of_its_own(cores) -> None:
    with TorchLinear(cores, 0.03, working_set=MIB) as torch_linear:
        eager, prepacked = torch_linear(512, 256, 3)
        assert eager is not None
        assert eager > 0
        assert prepacked is None or prepacked > 0
        torch_linear._process.kill()
        torch_linear._process.wait()
        assert torch_linear(512, 256, 3) == (None, None)
