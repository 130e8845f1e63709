"""Options as they are settled on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from dualpace import resolution
from dualpace.core.config import POLICIES, Device, EngineOptions, PolicyName
from dualpace.resolution import resolve


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({}, 0),
        ({"cpu_route": "local"}, 0),
        ({"cpu_route": "assist"}, 1),
        ({"cpu_route": "assist2", "host_weights": "none"}, 1),
        ({"host_weights": "none"}, 1),
    ],
)
def test_who_wants_assists_without_a_gpu_is_told_once_that_they_are_slow(
    options: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    resolve(EngineOptions(model="smollm2", device="cpu", host_kv_size="64MiB", **options))
    told = [each for each in caplog.records if "without a GPU an assist" in each.message]
    assert len(told) == warnings


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("device", "asked_for", "steps"),
    [("cuda", None, 2), ("cuda", False, 1), ("cpu", None, 1), ("cpu", True, 2)],
)
def test_a_gpu_plans_ahead_unless_told_otherwise(
    policy: PolicyName,
    device: Device,
    asked_for: bool | None,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolution, "cuda_device_count", lambda: 1)
    options = EngineOptions(
        model="smollm2", device=device, policy=policy, host_kv_size="64MiB",
        async_scheduling=asked_for,
    )  # fmt: skip
    config, _ = resolve(options, to_measure=True)
    assert config.steps_in_flight == steps
