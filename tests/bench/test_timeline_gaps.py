"""benchmarks/timeline_gaps.py on a timeline whose gaps are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dualpace.core.timeline import Timeline

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "timeline_gaps.py"


def gaps(file: Path, *arguments: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_gaps_and_launches_are_told_apart_by_the_kind_of_step(tmp_path: Path) -> None:
    """A launch takes 3 ms; the device turns to decodes at once and to prompts 2 ms late. Steps of
    500 and of 100 tokens are of two kinds."""
    timeline = Timeline("gpu")
    now = 100.0
    for number in range(1, 21):
        prompts = number % 5 == 0
        begin = now + (2e-3 if prompts else 0.0)
        tokens = (500 if number % 10 else 100) if prompts else 8
        end = begin + {500: 20e-3, 100: 9e-3, 8: 6e-3}[tokens]
        timeline.add("launch", f"step {number}", begin - 1e-3, begin + 2e-3)
        timeline.add("device", f"step {number}", begin, end)
        timeline.add("steps", f"step {number}", begin - 1e-3, end, rows=8, tokens=tokens)
        timeline.add("copies", "load request-7", begin, end)
        now = end
    timeline.write(tmp_path)
    shown = gaps(tmp_path / "gpu.json")
    kinds = {
        title.removesuffix(", milliseconds"): shown[line + 4 : line + 8]
        for line, title in enumerate(map(str.strip, shown))
        if title.startswith(("decodes,", "prompts,"))
    }
    found = (
        ("decodes", "0.00", "6.00"),
        ("prompts, up to 128 tokens", "2.00", "9.00"),
        ("prompts, up to 512 tokens", "2.00", "20.00"),
    )
    assert list(kinds) == [kind for kind, _, _ in found]
    for kind, gap, device in found:
        for row, expected in zip(kinds[kind], (gap, "1.00", "3.00", device), strict=True):
            assert row.split("│")[3].strip() == expected, row
    few = gaps(tmp_path / "gpu.json", "--before", "0.05")
    for table, count in ((shown, "20"), (few, "6")):
        [copies] = [row.split("│") for row in table if "copies: load" in row]
        assert copies[2].strip() == count


def test_an_empty_timeline_says_so(tmp_path: Path) -> None:
    Timeline("gpu").write(tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as failure:
        gaps(tmp_path / "gpu.json")
    assert "no spans" in failure.value.stderr
