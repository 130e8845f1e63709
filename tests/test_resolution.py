"""Options as they are settled on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from dualpace.core.config import EngineOptions
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
