"""Gated steps with real processes: a CPU engine that dies or stops, and that no token changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpace.core.config import EngineOptions
from dualpace.core.sampling import SamplingParams
from dualpace.policy.cost_model import Point
from dualpace.profile.table import Profile
from dualpace.resolution import fingerprint_of, resolve
from dualpace.wiring import Server

OUTPUT_TOKENS = 300
NUM_REQUESTS = 10


@pytest.fixture
def options(tiny: Any, tmp_path: Path) -> EngineOptions:
    """Seats for about four of ten requests, by a profile that makes the host look worth its while:
    the dense layers cover the attention to any context."""
    chosen = EngineOptions(
        model=str(tiny.source.path), tokenizer="smollm2", dtype="float32", device="cpu",
        page_tokens=16, policy="gated", gpu_kv_tokens=1400, host_kv_size="64MiB",
        engine_timeout=6.0,
    )  # fmt: skip
    config, spec = resolve(chosen, to_measure=True)
    # NEO counts 0.8 ms for a launch in each layer, which steps of this length cover.
    points = tuple(
        Point(operation, size, context, seconds)
        for operation, seconds in (
            ("gpu_decode", 0.1), ("gpu_prefill", 0.1), ("cpu_attention", 0.001),
        )
        for size in (1, 256)
        for context in (0, 100_000)
    )  # fmt: skip
    profile = Profile(
        model="tiny", date="2026-01-01", fingerprint=fingerprint_of(config, spec),
        gpu_kv_tokens=1400, host_kv_tokens=4000, points=points,
    )  # fmt: skip
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(profile))
    return msgspec.structs.replace(chosen, profile=str(file))


@asynccontextmanager
async def serving(options: EngineOptions) -> AsyncIterator[Server]:
    server = await Server.start(options)
    try:
        yield server
    finally:
        await server.close()


async def answers(
    server: Server, tiny: Any, on_token: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Greedy answers to requests that run at the same time."""

    async def one(index: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        tokens: list[int] = []
        prompt = tiny.prompts[index % len(tiny.prompts)]
        async for delta in server.frontend.generate(prompt, params):
            tokens += delta.token_ids
            for _ in delta.token_ids:  # several, should the front end have been late
                on_token()
        return tokens

    return await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))


def moves(server: Server) -> Counter[str]:
    """What the GPU engine's scheduler has counted, as /metrics tells it."""
    counted: Counter[str] = Counter()
    for line in server.frontend.metrics.render().decode().splitlines():
        if line.startswith("dualpace_moves_total"):
            counted[line.split('kind="')[1].split('"')[0]] += int(float(line.split()[-1]))
    return counted


@pytest.mark.parametrize(("how", "ahead"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)])
def test_a_cpu_engine_that_dies_or_stops_in_gated_steps_changes_no_token(
    tiny: Any, options: EngineOptions, how: signal.Signals, ahead: bool
) -> None:
    """With steps planned ahead, as on a GPU, and without."""
    options = msgspec.structs.replace(options, async_scheduling=ahead)

    async def scenario() -> None:
        async with serving(options) as server:
            before = await answers(server, tiny)
            assert [tokens[:64] for tokens in before] == tiny.answers * 2
            left = 600

            def strike() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(server.supervisor.pids["cpu"], how)

            first = server.supervisor.pids["cpu"]
            assert await answers(server, tiny, strike) == before
            while server.frontend.missing or server.supervisor.pids.get("cpu") in (None, first):
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # until the last count has been told
            gated = moves(server)["gated"]
            assert gated > 0
            assert await answers(server, tiny) == before
            await asyncio.sleep(1.0)
            assert moves(server)["gated"] > gated

    asyncio.run(scenario())
