"""`bench figures`: which figures come of which reports, and what is written on them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dualpace.bench.drawing import MOST_INSIDE, add_legend, make_figure
from dualpace.bench.load import LoadRequest
from dualpace.bench.metrics import summarize
from dualpace.bench.plots import plot_tokens
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.report import Circumstances, report_dict
from dualpace.bench.results import Result, make_lines
from dualpace.cli.bench import bench_app

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def make_report(
    label: str, rate: float | None, host_kv: int, *, engines: str = "cpu", simulated: bool = False
) -> dict[str, Any]:
    """A report of two requests; the tokens after the first are by `engines`."""
    records = [
        RequestRecord(
            LoadRequest(100, 4), start, start + 4.0, 100,
            [
                Chunk(start + 0.5, 1, "gpu"),
                *(Chunk(start + 1.0 + step, 1, engines) for step in (0.0, 0.25, 2.0)),
            ],
        )
        for start in (0.0, 2.0)
    ]  # fmt: skip
    load = f"2 requests, made up, at {rate}/s; {label}"
    circumstances = Circumstances(
        "m", "", "a slide rule", "2026-11-30T05:13:18+00:00", load, "0.1.0 (abcdef1234)", label,
        "made up", rate, simulated,
    )  # fmt: skip
    report = report_dict(circumstances, summarize(records))
    return {"policy": label, "host_kv_tokens": host_kv, "gpu_kv_tokens": 1, **report}


ASSIST = {
    "hardware": "a slide rule", "date": "2026-11-30", "version": "0.1.0", "model": "m", "layers": 2,
    "work": [{"rows": 64, "layer": 3e-4, "copies": 2e-5, "over": 9e-5}],
    "turns": [
        {"rows": 64, "slots": slots, "beside": beside, "attention": attention, "turn": turn}
        for slots, beside, attention, turn in (
            (1, "nothing", 0.0, 4e-4), (1, "decodes", 3e-3, 6e-4), (2, "decodes", 3e-3, 9e-3),
        )
    ],
}  # fmt: skip


def draw(tmp_path: Path, *reports: Any, options: tuple[str, ...] = ()) -> Any:
    files = []
    for index, report in enumerate(reports):
        files.append(tmp_path / f"report-{index}.json")
        files[-1].write_text(json.dumps(report))
    return draw_files(tmp_path, *files, options=options)


def draw_files(tmp_path: Path, *files: Path, options: tuple[str, ...] = ()) -> Any:
    names = [str(file) for file in files]
    return CliRunner().invoke(
        bench_app, ["figures", *names, "--out", str(tmp_path / "figures"), *options]
    )


def texts(path: Path) -> str:
    """All text of an SVG, a line for each element."""
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def test_a_sweep_and_single_reports_give_every_figure_with_its_circumstances(
    tmp_path: Path,
) -> None:
    sweep = {"sweep": [make_report("dualpace", rate, 9000) for rate in (1.0, 2.0, None)]}
    alone = make_report("gpu-only", 2.0, 0, engines="gpu")
    more = make_report("dualpace", 2.0, 18000)
    result = draw(tmp_path, sweep, alone, more, ASSIST)
    assert result.exit_code == 0, result.output
    names = [Path(line).name for line in result.stdout.splitlines()]
    assert names == [
        "tokens-over-time-m-1.svg", "tokens-over-time-m-2.svg", "tokens-over-time-m-inf.svg",
        "cpu-progress-m-1.svg", "cpu-progress-m-2.svg", "cpu-progress-m-inf.svg",
        "latency-by-rate.svg", "itl-by-rate.svg", "throughput-by-host-kv-m-2.svg", "lengths.svg",
        "assisted-layer.svg",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "figures").iterdir()} == set(names)
    for name in names:
        assert "measured 2026-11-30 on a slide rule, DualPace 0.1.0" in texts(
            tmp_path / "figures" / name
        )
    over_time = texts(tmp_path / "figures" / "tokens-over-time-m-2.svg").splitlines()
    assert {"gpu-only", "dualpace, 9,000 on the host: CPU engine"} < set(over_time)
    assert "gpu-only: CPU engine" not in over_time
    # The first request's tokens are at 1, 1.25 and 3, the other's at 3, 3.25 and 5.
    assert "longest gap 1.75 s" in texts(tmp_path / "figures" / "cpu-progress-m-1.svg")


def test_simulated_is_written_on_what_is(tmp_path: Path) -> None:
    result = draw(
        tmp_path, make_report("a", 1.0, 0), make_report("a", 2.0, 0, simulated=True),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = texts(tmp_path / "figures" / "itl-by-rate.svg").splitlines()
    assert {"a, measured", "a, simulated"} < set(written)
    assert any(line.startswith("simulated 2026-11-30 on a slide rule") for line in written)
    assert any(line.startswith("measured 2026-11-30 on a slide rule") for line in written)


def make_old_report() -> dict[str, Any]:
    """As it was before there were time lines in it."""
    newer = ("timeline", "request_rate", "lengths", "version", "label", "source", "simulated")
    report = make_report("gpu-only", 8.0, 0, engines="gpu")
    return {key: value for key, value in report.items() if key not in newer}


def test_older_reports_are_read_and_what_they_lack_is_told(tmp_path: Path) -> None:
    result = draw(
        tmp_path, make_old_report(), make_report("gpu-only", 1.0, 0), options=("--format", "png")
    )
    assert result.exit_code == 0, result.output
    for line in result.stdout.splitlines():
        assert Path(line).read_bytes().startswith(PNG_SIGNATURE)
    assert result.stderr.splitlines()[-1] == (
        "report-0.json is left out of tokens-over-time, cpu-progress, latency-by-rate, "
        "itl-by-rate, throughput-by-host-kv, lengths: it lacks timeline, request_rate, lengths"
    )


def test_a_dollar_in_a_name_begins_no_formula(tmp_path: Path) -> None:
    name = "$\\a{$"
    result = draw(tmp_path, make_report(name, 2.0, 5))
    assert result.exit_code == 0, result.output
    for line in result.stdout.splitlines():
        assert "lengths" in line or name in texts(Path(line))
    records = [RequestRecord(LoadRequest(3, 1), 0.0, 1.0, 3, [Chunk(1.0, 1)])]
    plot_tokens(tmp_path / "p.svg", records, Circumstances(name, "", "", "", "", ""))
    assert name in texts(tmp_path / "p.svg")


def test_nothing_to_draw_is_exit_code_1(tmp_path: Path) -> None:
    result = draw(tmp_path, make_old_report())
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot read"), ('{"a": 1}', "holds no report"), ("[]", "holds no report"),
     ("3", "holds no report"), ('{"sweep": [3]}', "holds no report"),
     ("[" * 100_000, "cannot read")],
)  # fmt: skip
def test_a_file_that_is_no_report_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(content)
    result = draw_files(tmp_path, file)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "odd.json" in result.stderr


@pytest.mark.parametrize(
    ("field", "value"),
    [("date", 5), ("hardware", None), ("timeline", {}), ("request_rate", "fast"), ("model", ...)],
)
def test_a_report_that_was_tampered_with_is_explained(
    tmp_path: Path, field: str, value: object
) -> None:
    report = make_report("dualpace", 2.0, 5)
    report[field] = value
    if value is ...:
        del report[field]
    result = draw(tmp_path, report)
    assert result.exit_code == 2, result.output
    assert "is not as the commands write it" in result.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(make_report("dualpace", 2.0, 5)))
    result = CliRunner().invoke(
        bench_app, ["figures", str(tmp_path / "r.json"), "--out", "/dev/null/figures"]
    )
    assert result.exit_code == 1
    assert "cannot write /dev/null/figures: Not a directory" in result.stderr


def test_lines_are_told_apart_by_what_differs_and_sorted_along_their_axis() -> None:
    reports = [make_report("dualpace", rate, host_kv) for host_kv in (5, 9) for rate in (4.0, 1.0)]
    reports.append(make_report("gpu-only", 2.0, 0))
    results = [Result(f"{index}", report) for index, report in enumerate(reports)]
    by_rate = make_lines(results, along="request_rate")
    assert {name: [each.file for each in line] for name, line in by_rate.items()} == {
        "dualpace, 5 on the host": ["1", "0"],
        "dualpace, 9 on the host": ["3", "2"],
        "gpu-only": ["4"],
    }
    by_room = make_lines(results, along="host_kv_tokens")
    assert list(by_room) == ["dualpace, 4/s", "dualpace, 1/s", "gpu-only"]


def test_files_of_the_same_label_are_told_apart_by_their_names(tmp_path: Path) -> None:
    first, second = (make_report("dualpace", 2.0, 9000) for _ in range(2))
    second["date"] = "2026-12-01T05:13:18+00:00"
    result = draw(tmp_path, first, second)
    assert result.exit_code == 0, result.output
    for name in ("tokens-over-time-m-2", "cpu-progress-m-2", "latency-by-rate", "itl-by-rate"):
        written = texts(tmp_path / "figures" / f"{name}.svg").splitlines()
        assert {"dualpace, report-0.json", "dualpace, report-1.json"} <= set(written), name
        assert "dualpace" not in written


def test_a_long_legend_covers_nothing_of_what_is_drawn() -> None:
    for lines in (MOST_INSIDE, 4 * MOST_INSIDE):
        figure, (axes,) = make_figure("many lines", "a slide rule")
        for index in range(lines):
            name = f"gated-free, {index}00,000 on the host: CPU engine"
            axes.plot([0, 1], [0, index], label=name)
        add_legend(axes)
        figure.draw_without_rendering()  # warns where no room is left for the axes
        legend, drawn = axes.get_legend().get_window_extent(), axes.get_window_extent()
        if lines == MOST_INSIDE:
            assert drawn.x0 <= legend.x0 <= legend.x1 <= drawn.x1
        else:
            assert drawn.x1 <= legend.x0 <= legend.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= legend.y0 <= legend.y1 <= drawn.y1
            assert drawn.width > 0.25 * figure.bbox.width


def test_files_called_the_same_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    files = [tmp_path / folder / "result.json" for folder in ("monday", "tuesday")]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps(make_report("dualpace", 2.0, 9000)))
    result = draw_files(tmp_path, *files)
    assert result.exit_code == 0, result.output
    written = texts(tmp_path / "figures" / "itl-by-rate.svg").splitlines()
    assert {"dualpace, monday/result.json", "dualpace, tuesday/result.json"} <= set(written)


def test_names_longer_than_the_axes_leave_these_their_room(tmp_path: Path) -> None:
    files = [tmp_path / f"{name * 200}.json" for name in "ab"]
    for file in files:
        file.write_text(json.dumps(make_report("dualpace", 2.0, 9000)))
    result = draw_files(tmp_path, *files)  # a layout that does not come about is warned of
    assert result.exit_code == 0, result.exception


def test_files_of_different_rates_are_one_line() -> None:
    results = [Result(f"{rate}.json", make_report("a", rate, 0)) for rate in (2.0, 1.0)]
    by_rate = make_lines(results, along="request_rate")
    assert {name: [each.file for each in line] for name, line in by_rate.items()} == {
        "a": ["1.0.json", "2.0.json"]
    }
