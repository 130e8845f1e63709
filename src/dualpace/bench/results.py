"""Reads the JSON reports of replays and assists back, from one run or a sweep, of any age.

A report is kept as the dict that it is: what an older one lacks is for its reader to miss.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualpace.core.errors import ConfigError


@dataclass(frozen=True)
class Result:
    """One report and the name of its file, with folders as far as they tell it from another."""

    file: str
    report: Mapping[str, Any]

    @property
    def is_assist(self) -> bool:
        """True for a report of `bench assist`, False for one of a replay."""
        return "turns" in self.report

    @property
    def simulated(self) -> bool:
        return bool(self.report.get("simulated"))

    @property
    def label(self) -> str:
        """What was compared: a policy, another server, else the model."""
        label = self.report.get("label") or self.report.get("policy") or self.report["model"]
        return str(label)

    @property
    def load(self) -> str:
        """What was asked of the server, without how it was set up and for how long it was seen."""
        return str(self.report["load"]).partition(";")[0]


def read_results(files: Iterable[Path]) -> list[Result]:
    """The reports in `files`, in their order. Raises `ConfigError` naming a file without any."""
    files = list(files)
    return [Result(_name(file, files), report) for file in files for report in _reports(file)]


def _name(file: Path, files: Sequence[Path]) -> str:
    """The shortest end of its path that no other one of `files` has."""
    others = [other.parts for other in files if other != file]
    ends = (file.parts[-count:] for count in range(1, len(file.parts) + 1))
    unique = (end for end in ends if not any(other[-len(end) :] == end for other in others))
    return str(Path(*next(unique, file.parts)))


def _reports(file: Path) -> Iterator[dict[str, Any]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if isinstance(content, dict):
        content = content.get("sweep", [content])
    for report in content if isinstance(content, list) and content else [None]:
        if not (
            isinstance(report, dict) and ({"turns", "work"} <= {*report} or "ttft_s" in report)
        ):
            raise ConfigError(f"{file} holds no report of bench serve, offline, assist or simulate")
        yield report


@contextlib.contextmanager
def as_written(files: Sequence[Path]) -> Iterator[None]:
    """Reports are read as the dicts that they are: one that somebody has edited, or that another
    program wrote, shows by what reading it raises. Raises `ConfigError` instead."""
    try:
        yield
    except ConfigError:  # a ValueError, too
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        among = "" if len(files) == 1 else "one of "
        raise ConfigError(
            f"{among}{', '.join(map(str, files))} is not as the commands write it "
            f"({type(error).__name__}: {error})"
        ) from error


def describe_origins(results: Sequence[Result]) -> str:
    """Where and when they were made, and whether measured or simulated: a line for each machine and
    version."""
    dates: dict[tuple[str, str], list[str]] = {}
    for result in results:
        verb = "simulated" if result.simulated else "measured"
        hardware = result.report.get("hardware", "hardware not recorded")
        version = result.report.get("version", "version not recorded")
        place = f"on {hardware.removeprefix('simulated ')}, DualPace {version}"
        dates.setdefault((verb, place), []).append(result.report.get("date", "(no date)")[:10])
    return "\n".join(
        f"{verb} {' to '.join(sorted({min(days), max(days)}))} {place}"
        for (verb, place), days in dates.items()
    )


# What may tell two results apart, as it is called in a legend.
_PARTS: dict[str, Callable[[Result], str]] = {
    "label": lambda result: result.label,
    "simulated": lambda result: "simulated" if result.simulated else "measured",
    "model": lambda result: str(result.report["model"]),
    "source": lambda result: str(result.report.get("source", "")),
    "request_rate": lambda result: f"{result.report.get('request_rate') or math.inf:g}/s",
    "gpu_kv_tokens": lambda result: f"{result.report.get('gpu_kv_tokens', 0):,} tokens on the GPU",
    "host_kv_tokens": lambda result: f"{result.report.get('host_kv_tokens', 0):,} on the host",
}


def make_lines(results: Sequence[Result], along: str) -> dict[str, list[Result]]:
    """The results in lines along the axis `along` (a key of a report), by name, sorted along it.

    All of a line differ in that key only; along "date" each is drawn for itself. The line's name is
    the label, and what else tells it apart from lines of the same label: at last the file, where
    several have the same to say. Lines are in the order of their first results.
    """
    parts = [part for name, part in _PARTS.items() if name != along]
    alike: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        alike.setdefault(tuple(part(result) for part in parts), []).append(result)
    lines: dict[tuple[str, ...], list[Result]] = {}
    for key, line in alike.items():
        by_file = _repeats(line, along)
        for result in line:
            lines.setdefault((*key, result.file if by_file else ""), []).append(result)
    named = {}
    for key, line in lines.items():
        same = [other for other in lines if other[0] == key[0]]
        told = [value for value, *others in zip(key, *same, strict=True) if len({*others}) > 1]
        name = ", ".join((key[0], *filter(None, told)))
        named[name] = sorted(line, key=lambda r: r.report[along])
    return named


def _repeats(line: Sequence[Result], along: str) -> bool:
    """True if files of the line tell of the same place on the axis."""
    if along == "date":
        return len({result.file for result in line}) > 1
    places = {(result.file, result.report[along]) for result in line}
    return len({place for _, place in places}) < len(places)
