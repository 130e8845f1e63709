"""What `bench assist` runs, and what it says where that does not fit. The measuring needs a GPU."""

from __future__ import annotations

import msgspec
import pytest

from dualpace.cli.bench_assist import batches_beside, with_host_batch
from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.errors import ConfigError
from dualpace.resolution import resolve


@pytest.fixture
def config(tiny_model: str) -> EngineConfig:
    options = EngineOptions(
        model=tiny_model, load_format="dummy", gpu_kv_tokens=1024, host_kv_size="1MiB",
        host_weights="none",
    )  # fmt: skip
    return msgspec.structs.replace(resolve(options)[0], host_pages=16)


def test_steps_and_iterations_are_as_long_as_asked_for(config: EngineConfig) -> None:
    beside = batches_beside(config, (4, 100), 200)
    assert [row.end for row in beside["decodes"].rows] == [100] * 4
    assert [row.end for row in beside["prompts"].rows] == [200]
    settled, batch = with_host_batch(config, (3, 100))
    assert batch is not None
    assert [row.end for row in batch.rows] == [100] * 3
    assert settled.host_pages == len({page for row in batch.rows for page in row.pages}) == 12


def test_without_host_rows_no_iterations_are_run(config: EngineConfig) -> None:
    settled, batch = with_host_batch(config, (0, 1100))
    assert (settled.host_pages, batch) == (0, None)


def test_what_does_not_fit_is_named_by_its_option(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match=r"--decode-context 257 .* 256 tokens"):
        batches_beside(config, (1, 257), 64)
    with pytest.raises(ConfigError, match="--chunk 300 "):
        batches_beside(config, (1, 64), 300)
    with pytest.raises(ConfigError, match="--gpu-kv-tokens has no room for the decodes beside"):
        batches_beside(config, (64, 100), 64)
    with pytest.raises(ConfigError, match="--host-context 300 "):
        with_host_batch(config, (1, 300))
    with pytest.raises(ConfigError, match="more than the host has"):
        with_host_batch(config, (64, 100))
