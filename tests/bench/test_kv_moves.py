"""What benchmarks/kv_moves.py asks an executor for, and that it works where there is no GPU."""

from __future__ import annotations

import importlib.util
import itertools
import time
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dualpace.core.errors import EngineError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kv_moves.py"


@pytest.fixture(scope="module")
def kv_moves() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # as when it is run as a script
        spec = importlib.util.spec_from_file_location("kv_moves", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


class Recorder:
    """Notes in which order things are launched and awaited."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []

    def launch(self, batch: Any) -> Any:
        return self._started("step", batch.number)

    def copy(self, job: Any) -> Any:
        return self._started(job.kind, job.number)

    def _started(self, kind: str, number: int) -> Any:
        self.log.append(("start", kind, number))
        done: Future[None] = Future()
        done.set_result(None)
        log, result = self.log, done.result
        done.result = lambda timeout=None: (log.append(("end", kind, number)), result())[1]
        return done


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_moved_requests_have_pages_of_their_own(
    kv_moves: ModuleType, direction: str, scattered: bool
) -> None:
    moves = kv_moves.jobs(direction, first_page=50, pages=32, scattered=scattered)
    once = list(itertools.islice(moves, kv_moves.REQUESTS))
    source, target = (sorted(page for job in once for page in side(job)) for side in (
        lambda job: job.source, lambda job: job.target
    ))  # fmt: skip
    count = 32 * kv_moves.REQUESTS
    host, gpu = (source, target) if direction == "load" else (target, source)
    assert host == list(range(count))
    assert gpu == list(range(50, 50 + count))
    runs = [job for job in once if job.source == list(range(job.source[0], job.source[0] + 32))]
    assert len(runs) == (0 if scattered else len(once))


def test_a_prompt_for_the_host_lands_after_each_step_and_the_next_one_runs_meanwhile(
    kv_moves: ModuleType,
) -> None:
    steps = list(kv_moves.prompt_steps("p", 70, 32, "host", 16))
    assert [(row.start, row.end, row.sample) for step in steps for row in step.rows] == [
        (0, 32, False), (32, 64, False), (64, 70, True)
    ]  # fmt: skip
    assert all(row.pages == [0, 1, 2, 3, 4] for step in steps for row in step.rows)
    executor = Recorder()
    assert kv_moves.prefill_seconds(executor, steps) > 0.0
    assert executor.log == [
        ("start", "step", 1), ("start", "step", 2), ("end", "step", 1), ("start", "land", 1),
        ("start", "step", 3), ("end", "step", 2), ("start", "land", 2), ("end", "step", 3),
        ("start", "land", 3), ("end", "land", 1), ("end", "land", 2), ("end", "land", 3),
    ]  # fmt: skip


def test_a_stream_of_copies_ends_with_its_context_and_tells_of_a_failure(
    kv_moves: ModuleType,
) -> None:
    executor = Recorder()
    with stream_of(kv_moves, executor) as stream:
        while not stream.requests:
            time.sleep(0.001)
    started = [number for what, _, number in executor.log if what == "start"]
    ended = [number for what, _, number in executor.log if what == "end"]
    assert started == ended == list(range(1, len(started) + 1))
    with (
        pytest.raises(EngineError, match="no such page"),
        stream_of(kv_moves, Refusing()) as failing,
    ):
        failing._thread.join()


def stream_of(kv_moves: ModuleType, executor: Any) -> Any:
    return kv_moves.UnbrokenStream(executor, kv_moves.jobs("load", 0, 4, False))


class Refusing:
    def copy(self, job: Any) -> Any:
        raise EngineError("no such page")
