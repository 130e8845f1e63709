"""An engine's timeline as trace viewers read it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dualpace.core import timeline
from dualpace.core.timeline import Timeline


def test_spans_are_written_in_microseconds_and_a_restarted_engine_leaves_the_firsts(
    tmp_path: Path,
) -> None:
    now = [1.0]
    first = Timeline("gpu", lambda: now[0])
    with first.span("loop", "plan"):
        now[0] = 1.5
    first.add("steps", "step 7", 1.0, 1.25, rows=3)
    first.add("loop", "drain", 1.0, 1.0)
    first.write(tmp_path / "new")
    Timeline("gpu").write(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["gpu-2.json", "gpu.json"]
    plan, step = json.loads((tmp_path / "new" / "gpu.json").read_text())["traceEvents"]
    assert plan == {
        "name": "plan", "ph": "X", "pid": "gpu", "tid": "loop", "ts": 1e6, "dur": 5e5, "args": {},
    }  # fmt: skip
    assert (step["dur"], step["args"]) == (2.5e5, {"rows": 3})


def test_what_is_too_much_is_dropped_and_a_folder_that_cannot_be_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeline, "MOST_SPANS", 2)
    full = Timeline("cpu")
    for start in range(5):
        full.add("steps", f"step {start}", start, start + 1)
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO):
        full.write(tmp_path / "file" / "folder")
        full.write(tmp_path)
    assert "not written" in caplog.text
    assert "2 spans, 3 dropped" in caplog.text
    assert len(json.loads((tmp_path / "cpu.json").read_text())["traceEvents"]) == 2
