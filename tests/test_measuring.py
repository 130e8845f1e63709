"""What the process that measures engines builds them over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dualpace import measuring
from dualpace.core.config import Device, EngineConfig, EngineOptions
from dualpace.resolution import resolve


class BuiltError(Exception):
    """The GPU engine's executor, as it was asked for."""


@pytest.mark.parametrize(
    ("device", "gpu_pages", "over_host_pages"),
    [("cuda", None, False), ("cuda", 99, False), ("cuda", 0, True), ("cpu", 99, True)],
)
def test_cuda_registers_no_host_pages_while_it_is_measured_unless_it_has_no_others(
    device: Device, gpu_pages: int | None, over_host_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: EngineConfig, arena: Any, wake: object) -> None:
        raise BuiltError(config.host_pages > 0, arena is not None)

    monkeypatch.setattr(measuring, "gpu_executor", build)
    options = EngineOptions(model="smollm2", device="cpu", host_kv_size="16MiB")
    config, _ = resolve(options, to_measure=True)
    config = msgspec.structs.replace(
        config, device=device, gpu_pages=gpu_pages, cpu_routes=("local",)
    )
    with pytest.raises(BuiltError) as built:
        next(measuring.profile_executors(config))
    assert built.value.args == (over_host_pages, over_host_pages)
