"""What the stand-in does beyond the contract that tests/gpu holds both GPU executors to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dualpace.core.errors import EngineError
from dualpace.core.plan import PENDING, Batch, BatchRow, StepResult, Tier
from dualpace.core.sampling import DecodeParams
from dualpace.cpu.standin import StandInExecutor


class CountingModel:
    """Samples last token + 1; refuses token ids below 0."""

    def page_bytes(self, page_tokens: int) -> int:
        return page_tokens

    def step(self, rows, arena, page_tokens) -> StepResult:
        if any(token < 0 for row in rows for token in row.tokens):
            raise ValueError("token id out of range")
        return StepResult([row.tokens[-1] + 1 if row.sample else None for row in rows])


@pytest.fixture
def launch():
    executor = StandInExecutor(CountingModel(), 4, np.zeros(64, np.uint8), 16, lambda: None)
    yield lambda *rows: executor.launch(Batch(1, rows))
    executor.close()


def row(name: str, tokens: list[int], tier: Tier = "gpu", sample: bool = True) -> BatchRow:
    return BatchRow(name, tokens, 0, [0], tier, sample, DecodeParams())


def test_a_pending_token_is_the_one_that_the_last_step_sampled_for_the_row(
    launch: Callable[..., object],
) -> None:
    first = launch(row("a", [3, 4]), row("b", [7], "host"), row("c", [1], sample=False))
    second = launch(row("b", [PENDING], "host"), row("a", [PENDING]))
    assert first.result().tokens == [5, 8, None]
    assert second.result().tokens == [9, 6]


def test_a_failed_step_does_not_fail_the_one_launched_behind_it(
    launch: Callable[..., object],
) -> None:
    launch(row("a", [3])).result()
    failed = launch(row("a", [-7]))
    behind = launch(row("a", [PENDING]), row("b", [4]))
    with pytest.raises(EngineError, match="batch 1, gpu tier"):
        failed.result()
    assert behind.result().tokens[1] == 5  # of "a" nobody takes the token
