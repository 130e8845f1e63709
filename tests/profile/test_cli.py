"""`dualpace profile` on a tiny model with random weights, and on the engines themselves."""

from __future__ import annotations

import csv
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from dualpace.cli import measurement
from dualpace.cli import profile as cli
from dualpace.core.errors import EngineError
from dualpace.core.plan import Batch, Executor, StepResult, Ticket
from dualpace.cpu.executor import CpuExecutor
from dualpace.policy.cost_model import OPERATIONS, Operation, Point
from dualpace.policy.gated import GATED_OPERATIONS
from dualpace.profile.check import predict
from dualpace.profile.probes import Room
from dualpace.profile.shipped import open_profile, shipped_names
from dualpace.profile.table import load, save


def run(model: str) -> list[str]:
    return [
        "run", model, "--load-format", "dummy", "--host-kv-size", "1MiB", "--gpu-kv-tokens", "512",
        "--cpu-cores", "1", "--seconds", "0.3",
    ]  # fmt: skip


def stored(cache: Path) -> list[Path]:
    return list(cache.rglob("*.json"))


def test_both_engines_are_measured_stored_and_shown(tiny_model: str, cache: Path) -> None:
    result = CliRunner().invoke(cli.profile_app, run(tiny_model))
    assert result.exit_code == 0, result.output
    [path] = stored(cache)
    profile = load(path)
    assert {point.operation for point in profile.points} == set(OPERATIONS)
    assert all(point.seconds > 0 for point in profile.points)
    assert profile.gpu_kv_tokens == 512
    assert profile.fingerprint.num_layers == 2

    for argument in (tiny_model, str(path)):
        result = CliRunner().invoke(cli.profile_app, ["show", argument, "--cpu-cores", "1"])
        assert result.exit_code == 0, result.output
        assert all(f"{operation}: ms by" in result.output for operation in OPERATIONS)
        assert f"stored in {path}" in result.stderr


def test_a_profile_that_comes_along_is_shown_with_its_file() -> None:
    name = shipped_names()[0]
    result = CliRunner().invoke(cli.profile_app, ["show", name])
    assert result.exit_code == 0, result.output
    line = result.stderr.splitlines()[-1]
    assert load(Path(line.removeprefix("stored in "))) == open_profile(name)


def test_without_a_gpu_gated_steps_can_be_measured_for_too(tiny_model: str, cache: Path) -> None:
    arguments = [*run(tiny_model), "--policy", "gated", "--host-kv-size", "8MiB", "--seconds", "2"]
    result = CliRunner().invoke(cli.profile_app, arguments)
    assert result.exit_code == 0, result.output
    costs = load(stored(cache)[0]).cost_model()
    assert costs.covers(*GATED_OPERATIONS, "cpu_iteration")


def test_a_check_measures_other_points_and_fails_where_the_profile_is_off(
    tiny_model: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(cli.profile_app, run(tiny_model)).exit_code == 0
    profile = msgspec.structs.replace(
        load(stored(cache)[0]),
        points=tuple(
            Point(operation, size, context, 0.01 + 1e-3 * size + 1e-5 * context)
            for operation in OPERATIONS
            for size in (1, 128)
            for context in (0, 256)
        ),
    )
    save(profile)
    costs = profile.cost_model()
    asked: list[tuple[int, int]] = []

    def check(factor: float) -> tuple[int, str]:
        def probe(
            operation: Operation,
            executor: Executor,
            room: Room,
            seconds: float,
            points: list[tuple[int, int]],
            depth: int,
        ) -> Iterator[Point]:
            asked.extend(points)
            for size, context in points:
                point = Point(operation, size, context, 1.0)
                yield msgspec.structs.replace(point, seconds=factor * predict(costs, point).seconds)

        monkeypatch.setattr(measurement, "probe", probe)
        asked_for = ["check", *run(tiny_model)[1:], "--csv", str(tmp_path / "points.csv")]
        result = CliRunner().invoke(cli.profile_app, asked_for)
        return result.exit_code, result.output

    assert check(1.05)[0] == 0
    with (tmp_path / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["size"]), int(row["context"])) for row in rows] == asked
    for row in rows:
        assert float(row["measured_s"]) == pytest.approx(1.05 * float(row["predicted_s"]))
    assert not {*asked} & {(point.size, point.context) for point in profile.points}
    code, output = check(1.5)
    assert code == 1
    assert "33.3%" in output


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Measuring takes no time and finds `value`; the first operation may be the last."""

    def measured(value: float, *, interrupt: bool) -> None:
        def probe(
            operation: Operation, executor: Executor, room: Room, seconds: float, depth: int
        ) -> Iterator[Point]:
            yield Point(operation, 1, 16, value)
            if interrupt:
                raise KeyboardInterrupt

        monkeypatch.setattr(measurement, "probe", probe)

    return measured


def test_after_ctrl_c_new_points_are_kept_beside_the_old_ones(
    tiny_model: str, cache: Path, measured: Callable[..., None]
) -> None:
    measured(1.0, interrupt=False)
    assert CliRunner().invoke(cli.profile_app, run(tiny_model)).exit_code == 0
    measured(2.0, interrupt=True)
    again = CliRunner().invoke(cli.profile_app, run(tiny_model))
    assert again.exit_code == 130
    assert "kept: 1 of gpu_prefill, 1 of cpu_iteration" in again.stderr
    [path] = stored(cache)
    seconds = {point.operation: point.seconds for point in load(path).points}
    assert seconds == {"gpu_decode": 2.0, "gpu_prefill": 1.0, "cpu_iteration": 1.0}


def test_what_is_measured_after_the_other_engine_has_failed_is_not_kept(
    tiny_model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = CpuExecutor.launch
    failing = threading.Event()

    def fail(executor: CpuExecutor, batch: Batch) -> Ticket[StepResult]:
        if failing.is_set():
            raise EngineError("the other engine is gone")
        return launch(executor, batch)

    def probe(
        operation: Operation, executor: Executor, room: Room, seconds: float, depth: int
    ) -> Iterator[Point]:
        yield Point(operation, 1, 16, 1.0)
        failing.set()
        for thread in threading.enumerate():
            if thread.name == "beside":
                thread.join()
        yield Point(operation, 2, 16, 1.0)

    monkeypatch.setattr(CpuExecutor, "launch", fail)
    monkeypatch.setattr(measurement, "probe", probe)
    result = CliRunner().invoke(cli.profile_app, run(tiny_model))
    assert result.exit_code == 1
    assert "the other engine is gone" in result.stderr
    [path] = stored(cache)
    assert [(point.operation, point.size) for point in load(path).points] == [("gpu_decode", 1)]


@pytest.mark.parametrize("interrupt", [True, False])
def test_points_measured_with_other_options_are_not_mixed_and_that_is_said(
    tiny_model: str, cache: Path, measured: Callable[..., None], interrupt: bool
) -> None:
    measured(1.0, interrupt=False)
    first = CliRunner().invoke(cli.profile_app, run(tiny_model))
    assert "replaces" not in first.stderr
    measured(2.0, interrupt=interrupt)
    other = [*run(tiny_model), "--max-model-len", "64"]
    again = CliRunner().invoke(cli.profile_app, other)
    assert again.exit_code == (130 if interrupt else 0)
    assert "replaces the profile of" in again.stderr
    assert "--gpu-kv-tokens 512" in again.stderr
    assert ("nothing is kept" in again.stderr) == interrupt
    [path] = stored(cache)
    profile = load(path)
    assert {point.seconds for point in profile.points} == {2.0}
    assert profile.options["max_model_len"] == 64


def test_a_stored_profile_that_is_damaged_is_measured_anew(
    tiny_model: str, cache: Path, measured: Callable[..., None]
) -> None:
    measured(1.0, interrupt=False)
    assert CliRunner().invoke(cli.profile_app, run(tiny_model)).exit_code == 0
    [path] = stored(cache)
    path.write_text("{")
    measured(2.0, interrupt=True)
    assert CliRunner().invoke(cli.profile_app, run(tiny_model)).exit_code == 130
    assert {point.seconds for point in load(path).points} == {2.0}


def test_a_place_that_cannot_be_written_is_told_before_measuring(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(measurement.Measured, "run", lambda *_: pytest.fail("it measured"))
    result = CliRunner().invoke(cli.profile_app, run(tiny_model))
    assert result.exit_code == 2
    assert "cannot store profiles in /dev/null" in result.stderr
    assert "XDG_CACHE_HOME" in result.stderr


def test_a_disk_that_is_full_by_then_loses_no_measurement(
    tiny_model: str, cache: Path, measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    measured(1.0, interrupt=False)
    result = CliRunner().invoke(cli.profile_app, run(tiny_model))
    assert result.exit_code == 1
    assert "cannot store the profile in" in result.stderr
    assert "No space left on device" in result.stderr
    assert "gpu_decode: ms by" in result.stdout
    assert "stored in" not in result.stderr


def test_a_run_without_time_to_measure_fails_and_replaces_nothing(
    tiny_model: str, cache: Path
) -> None:
    assert CliRunner().invoke(cli.profile_app, run(tiny_model)).exit_code == 0
    before = stored(cache)[0].read_bytes()
    result = CliRunner().invoke(cli.profile_app, [*run(tiny_model), "--seconds", "0"])
    assert result.exit_code == 2
    assert "--seconds" in result.stderr
    assert stored(cache)[0].read_bytes() == before


def test_what_was_never_measured_cannot_be_shown(tiny_model: str) -> None:
    for argument in (tiny_model, "absent.json", "no-such-model"):
        result = CliRunner().invoke(cli.profile_app, ["show", argument])
        assert result.exit_code == 2
        assert result.output.startswith("error: ")
