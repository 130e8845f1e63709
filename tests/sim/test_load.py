"""What the CPU engine is told of the GPU's prompts."""

from __future__ import annotations

import pytest

from dualpace.scheduler.load import SECONDS, PrefillShare


def test_steps_weigh_by_their_time_and_not_by_their_number() -> None:
    """Of 0.25 s, a step with prompts takes 0.2 and has them for three quarters of it."""
    share = PrefillShare()
    now, values = 0.0, []
    while now < 20 * SECONDS:
        share.step(now, 0.75)
        now += 0.2
        share.step(now, 0.0)
        now += 0.05
        values.append(share.value)
    assert values[-1] == pytest.approx(0.75 * 0.2 / 0.25, abs=0.05)
    assert max(values) - min(values[len(values) // 2 :]) < 0.1
    share.step(now + SECONDS, 0.0)
    assert share.value == pytest.approx(values[-1] / 2.718, rel=0.1)
