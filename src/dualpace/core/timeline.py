"""What an engine did when: spans in lanes, written as a trace that Chrome and Perfetto show.

All engines of a machine are on one clock, so that their files can be looked at together.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)
MOST_SPANS = 1_000_000  # kept; some minutes of a busy engine
SHORTEST = 20e-6  # seconds of a span that is worth keeping


class Timeline:
    """Thread-safe. Spans beyond `MOST_SPANS` are dropped, which `write` tells."""

    def __init__(self, engine: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._engine = engine
        self._spans: list[dict[str, Any]] = []
        self._dropped = 0

    def add(self, lane: str, name: str, start: float, end: float, **facts: int | str) -> None:
        """What lasted from `start` to `end`, seconds by `clock`."""
        if end - start < SHORTEST:
            return
        if len(self._spans) >= MOST_SPANS:
            self._dropped += 1
            return
        self._spans.append(
            {"name": name, "ph": "X", "pid": self._engine, "tid": lane, "ts": start * 1e6,
             "dur": (end - start) * 1e6, "args": facts}
        )  # fmt: skip

    @contextlib.contextmanager
    def span(self, lane: str, name: str, **facts: int | str) -> Iterator[None]:
        """What is done in this context."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(lane, name, start, self.clock(), **facts)

    def write(self, folder: Path) -> None:
        """To the first of {engine}.json, {engine}-2.json, … that is not there yet: an engine that
        was restarted leaves its predecessor's. A failure is logged, no more."""
        names = itertools.chain(
            [f"{self._engine}.json"],
            (f"{self._engine}-{number}.json" for number in itertools.count(2)),
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = next(path for name in names if not (path := folder / name).exists())
            path.write_bytes(msgspec.json.encode({"traceEvents": self._spans}))
        except OSError as error:
            logger.error("the timeline was not written: %s", error)
            return
        logger.info("timeline: %s, %d spans, %d dropped", path, len(self._spans), self._dropped)
