"""Options as they are settled on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dualpace import resolution
from dualpace.core.config import POLICIES, Device, EngineOptions, PolicyName
from dualpace.core.errors import ConfigError
from dualpace.cpu import memory
from dualpace.resolution import resolve

GIB = 2**30


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


def test_without_a_gpu_both_pools_are_of_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for as the GPU's is not the host's: auto takes less, more is refused. Weights
    and the engines' processes take some as well, 0.6 and 0.5 GiB here."""
    for module in (memory, resolution):
        monkeypatch.setattr(module, "available_memory", lambda: 8 * GIB)
    common = EngineOptions(model="smollm2", device="cpu")
    page_bytes = resolve(common)[0].page_bytes
    tokens = 4 * GIB // page_bytes * common.page_tokens

    def sizes(**options: Any) -> tuple[int, int]:
        asked = {"gpu_kv_tokens": tokens, **options}
        config, _ = resolve(msgspec.structs.replace(common, **asked))
        assert config.gpu_pages is not None
        return config.gpu_pages * page_bytes, config.host_pages * page_bytes

    assert sum(sizes(host_kv_size="2.75GiB")) <= 6.75 * GIB
    gpu, host = sizes()
    assert gpu > 3.9 * GIB
    assert 0 < host < (8 * GIB - gpu) / 2
    with pytest.raises(ConfigError, match=r"--host-kv-size 3 GiB .* does not fit"):
        sizes(host_kv_size="3GiB")
    with pytest.raises(ConfigError, match="--gpu-kv-tokens"):
        sizes(gpu_kv_tokens=3 * tokens)
