"""The CPU executor keeps the loop's contract: tickets, wake-ups, order, errors as EngineError."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dualpace.core.errors import EngineError
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.plan import Batch, BatchRow, CopyJob, StepResult
from dualpace.core.sampling import DecodeParams
from dualpace.cpu.executor import CpuExecutor
from dualpace.cpu.model import Decoded


class RecordingModel:
    """Yields 10 * token for every row once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.positions: list[int] = []

    def page_bytes(self, page_tokens: int) -> int:
        return page_tokens

    def prepare_arena(self, arena, offset: int, length: int) -> str:
        return "4 KiB pages"

    def decode(self, rows, arena, page_tokens, *, route) -> Decoded:
        assert self.gate.wait(5)
        if any(row.pages == [99] for row in rows):
            raise ValueError("row 0: page id 99 is out of range")
        self.positions += [row.start for row in rows]
        logprobs = {0: TokenLogprobs(-1.0, 1, [], [])} if len(rows) > 1 else {}
        return Decoded(np.array([10 * row.tokens[0] for row in rows], np.int32), None, logprobs)


@pytest.fixture
def setting():
    model, woken = RecordingModel(), threading.Semaphore(0)
    executor = CpuExecutor(model, bytearray(16), 16, woken.release)
    yield model, executor, woken
    model.gate.set()
    executor.close()


def batch(number: int, *, pages=(0,), tier="host", sample=(True,)) -> Batch:
    rows = [
        BatchRow(f"r{i}", [i + 1], number, list(pages), tier, wanted, DecodeParams())
        for i, wanted in enumerate(sample)
    ]
    return Batch(number, tuple(rows))


def test_launch_returns_at_once_and_wakes_the_loop_when_done(setting):
    model, executor, woken = setting
    first = executor.launch(batch(1, sample=(True, False, True)))
    second = executor.launch(batch(2))
    assert not first.done()
    assert not woken.acquire(blocking=False)
    model.gate.set()
    assert first.result() == StepResult([10, None, 30], {0: TokenLogprobs(-1.0, 1, [], [])})
    assert second.result() == StepResult([10])
    assert woken.acquire(timeout=5)
    assert woken.acquire(timeout=5)
    assert first.done()
    assert second.done()
    assert model.positions == [1, 1, 1, 2]


@pytest.mark.parametrize("wrong", [batch(7, pages=(99,)), batch(7, tier="gpu")])
def test_a_batch_that_cannot_run_fails_alone(setting, wrong):
    model, executor, woken = setting
    model.gate.set()
    with pytest.raises(EngineError, match="batch 7"):
        executor.launch(wrong).result()
    assert woken.acquire(timeout=5)
    assert executor.launch(batch(8)).result().tokens == [10]


def test_copies_are_not_the_cpu_engines_business(setting):
    with pytest.raises(EngineError, match="copies no pages"):
        setting[1].copy(CopyJob(1, "r", "load", [0], [0]))
