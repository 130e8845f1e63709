"""Both engines as processes, from Python: those that die or hang, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpace.core.config import EngineOptions
from dualpace.core.errors import EngineError
from dualpace.core.sampling import SamplingParams
from dualpace.llm import LLM, _abandon
from dualpace.wiring import Server

OUTPUT_TOKENS = 600
NUM_REQUESTS = 6


def options(tiny: Any, **more: Any) -> EngineOptions:
    """Two seats on the GPU, so that most requests live on the host. Exact arithmetic."""
    given = {
        "model": str(tiny.source.path),
        "tokenizer": "smollm2",
        "dtype": "float32",
        "device": "cpu",
        "page_tokens": 16,
        "gpu_kv_tokens": 1400,
        "host_kv_size": "64MiB",
        **more,
    }
    return EngineOptions(**given)


@asynccontextmanager
async def serving(chosen: EngineOptions) -> AsyncIterator[Server]:
    server = await Server.start(chosen)
    try:
        yield server
    finally:
        await server.close()


async def answers(server: Server, tiny: Any, on_token: Callable[[str], None]) -> list[list[int]]:
    """Greedy answers to requests that run at the same time; `on_token` hears each engine's name.

    The last one is under a penalty. Each token must come with its own logprobs.
    """

    async def one(index: int) -> list[int]:
        prompt = tiny.prompts[index % len(tiny.prompts)]
        penalised = index == NUM_REQUESTS - 1
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            repetition_penalty=1.2 if penalised else 1.0,
            logprobs=1,
        )
        tokens: list[int] = []
        async for delta in server.frontend.generate(prompt, params):
            tokens += delta.token_ids
            assert len(delta.logprobs) == len(delta.token_ids)
            if not penalised:
                assert tuple(each.top_ids[0] for each in delta.logprobs) == delta.token_ids
            for _ in delta.token_ids:  # several, should the front end have been late
                on_token(delta.engine)
        return tokens

    return await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))


class KillAfter:
    """Sends an engine a signal once it has made so many tokens."""

    number = signal.SIGKILL

    def __init__(self, server: Server, engine: Any, tokens: int) -> None:
        self.server, self.engine, self.tokens = server, engine, tokens

    def __call__(self, engine: str) -> None:
        self.tokens -= engine == self.engine
        if self.tokens == 0 and engine == self.engine:
            os.kill(self.server.supervisor.pids[self.engine], self.number)


class StopAfter(KillAfter):
    number = signal.SIGSTOP


async def recovered(server: Server, engine: Any, old: int) -> None:
    """Until another process than `old` is that engine, and both engines serve."""
    while server.supervisor.pids.get(engine) in (None, old) or server.frontend.missing:
        await asyncio.sleep(0.05)


async def strike_at_work(server: Server, tiny: Any, strike: type[KillAfter]) -> tuple[int, str]:
    """Strikes the GPU engine until that ends an answer: how often it took, and the error.

    At its first tokens, while it has prompts: how many decodes are its own depends. A front end
    that is busy can hear of them when the engine has made them all.
    """
    for times in range(1, 6):
        old, reason = server.supervisor.pids["gpu"], ""
        try:
            await answers(server, tiny, strike(server, "gpu", 20))
        except EngineError as error:
            reason = str(error)
        await recovered(server, "gpu", old)
        if reason:
            return times, reason
    raise AssertionError("the GPU engine's end ended no answer")


def test_killing_the_cpu_engine_in_mid_decode_loses_nothing(tiny: Any) -> None:
    async def scenario() -> None:
        # Without seats all but the first tokens are the CPU engine's, however fast the other is.
        async with serving(options(tiny, gpu_kv_tokens=0)) as server:
            before = await answers(server, tiny, lambda engine: None)
            assert [len(tokens) for tokens in before] == [OUTPUT_TOKENS] * NUM_REQUESTS
            assert [tokens[:64] for tokens in before[:5]] == tiny.answers
            first = server.supervisor.pids["cpu"]
            again = await answers(server, tiny, KillAfter(server, "cpu", 300))
            assert again == before
            await recovered(server, "cpu", first)
            engines: set[str] = set()
            assert await answers(server, tiny, engines.add) == before
            assert engines == {"gpu", "cpu"}
            metrics = server.frontend.metrics.render().decode()
            assert 'dualpace_engine_restarts_total{engine="cpu"} 1.0' in metrics
            await all_pages_free(server)

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_a_stopped_engine_is_killed_and_recovered_like_a_dead_one(tiny: Any, engine: Any) -> None:
    async def scenario() -> None:
        seats = 0 if engine == "cpu" else 1400
        async with serving(options(tiny, gpu_kv_tokens=seats, engine_timeout=3.0)) as server:
            before = await answers(server, tiny, lambda engine: None)
            times = 1
            if engine == "cpu":
                first = server.supervisor.pids["cpu"]
                assert await answers(server, tiny, StopAfter(server, "cpu", 100)) == before
                await recovered(server, "cpu", first)
            else:
                times, reason = await strike_at_work(server, tiny, StopAfter)
                assert "hung" in reason
            metrics = server.frontend.metrics.render().decode()
            assert f'dualpace_engine_hangs_total{{engine="{engine}"}} {times}.0' in metrics
            assert await answers(server, tiny, lambda engine: None) == before
            await all_pages_free(server)

    asyncio.run(scenario())


def test_a_host_without_weights_serves_and_survives_the_cpu_engines_death(tiny: Any) -> None:
    """The GPU engine computes the dense part of every iteration of the CPU engine."""

    async def scenario() -> None:
        chosen = options(tiny, cpu_route="assist2", host_weights="none", gpu_kv_tokens=0)
        async with serving(chosen) as server:
            engines: Counter[str] = Counter()
            before = await answers(server, tiny, lambda engine: engines.update([engine]))
            assert [tokens[:64] for tokens in before[:5]] == tiny.answers
            assert engines["cpu"] > OUTPUT_TOKENS
            first = server.supervisor.pids["cpu"]
            assert await answers(server, tiny, KillAfter(server, "cpu", 300)) == before
            await recovered(server, "cpu", first)
            again: Counter[str] = Counter()
            assert await answers(server, tiny, lambda engine: again.update([engine])) == before
            assert again["cpu"] > OUTPUT_TOKENS
            await all_pages_free(server)

    asyncio.run(scenario())


def test_clients_that_leave_at_any_moment_leave_no_page_behind(tiny: Any) -> None:
    async def one(server: Server, index: int) -> None:
        prompt = tiny.prompts[index % len(tiny.prompts)]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        stream = server.frontend.submit([prompt * 20], params)
        try:
            for _ in range(3 * index):
                await stream.take()
        finally:
            stream.close()

    async def scenario() -> None:
        async with serving(options(tiny)) as server:
            await asyncio.gather(*(one(server, index) for index in range(40)))
            await all_pages_free(server)

    asyncio.run(scenario())


async def all_pages_free(server: Server) -> None:
    """Both engines report every page free, within some reports of half a second."""
    for _ in range(100):
        values = dict(
            line.rsplit(" ", 1)
            for line in server.frontend.metrics.render().decode().splitlines()
            if line.startswith("dualpace_kv_pages")
        )
        free = {name: value for name, value in values.items() if "free" in name}
        if len(free) == 2 and all(
            float(value) == float(values[name.replace("free", "total")])
            for name, value in free.items()
        ):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(values)


def test_when_the_gpu_engine_dies_streams_end_with_an_error_and_service_returns(tiny: Any) -> None:
    async def scenario() -> None:
        async with serving(options(tiny)) as server:
            await strike_at_work(server, tiny, KillAfter)
            again = await answers(server, tiny, lambda engine: None)
            assert [tokens[:64] for tokens in again[:5]] == tiny.answers

    asyncio.run(scenario())


@pytest.mark.parametrize("second", ["gpu", "cpu"])
def test_an_engine_that_dies_while_all_are_restarted_is_one_more_restart(
    tiny: Any, second: Any
) -> None:
    async def scenario() -> None:
        async with serving(options(tiny)) as server:
            old = server.supervisor.pids
            os.kill(old["gpu"], signal.SIGKILL)
            while server.supervisor.pids.get(second) in (None, old[second]):
                await asyncio.sleep(0.01)
            os.kill(server.supervisor.pids[second], signal.SIGKILL)
            async with asyncio.timeout(60):
                while server.frontend.missing and not server.supervisor.failed.done():
                    await asyncio.sleep(0.05)
            assert not server.supervisor.failed.done()
            again = await answers(server, tiny, lambda engine: None)
            assert [tokens[:64] for tokens in again[:5]] == tiny.answers

    asyncio.run(scenario())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in its background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_llm_leaves_no_engines(tiny: Any, runs: Callable[[int], bool]) -> None:
    def children() -> set[int]:
        found: set[int] = set()
        for task in Path(f"/proc/{os.getpid()}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread may end between two looks
                found |= {int(pid) for pid in (task / "children").read_text().split()}
        return found

    before = children()

    def interrupt() -> None:
        while len(children() - before) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        LLM(**msgspec.structs.asdict(options(tiny)))
    assert not [pid for pid in children() - before if runs(pid)]


def test_a_start_that_is_complete_when_it_is_abandoned_leaves_no_engines(
    tiny: Any, runs: Callable[[int], bool]
) -> None:
    async def scenario() -> None:
        starting = asyncio.ensure_future(Server.start(options(tiny)))
        pids = (await starting).supervisor.pids
        await _abandon(starting)
        assert not any(map(runs, pids.values()))

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_says_why(tiny: Any, damaged: Path) -> None:
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        asyncio.run(Server.start(options(tiny, model=str(damaged))))


def test_llm_outputs_carry_logprobs_of_tokens_from_both_engines(tiny: Any) -> None:
    params = SamplingParams(
        temperature=1.0, seed=7, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2
    )
    # Without seats all but the first tokens are the CPU engine's, however fast the other is.
    with LLM(**msgspec.structs.asdict(options(tiny, gpu_kv_tokens=0))) as llm:
        outputs = llm.generate([tiny.prompts[0]] * NUM_REQUESTS, params, use_tqdm=False)
        silent = llm.generate([tiny.prompts[0]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert silent[0].outputs[0].logprobs is None
    choices = [output.outputs[0] for output in outputs]
    assert sum((choice.engines for choice in choices), Counter()).keys() == {"gpu", "cpu"}
    for choice in choices:
        assert choice.token_ids == choices[0].token_ids
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == OUTPUT_TOKENS
        total = 0.0
        for token_id, by_id in zip(choice.token_ids, choice.logprobs, strict=True):
            assert next(iter(by_id)) == token_id
            assert {1, 2} <= {each.rank for each in by_id.values()}
            total += by_id[token_id].logprob
        assert choice.cumulative_logprob == pytest.approx(total)


def test_both_engines_leave_a_timeline_of_their_steps_on_one_clock(
    tiny: Any, tmp_path: Path
) -> None:
    begin = time.monotonic()
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    chosen = options(tiny, timeline=str(tmp_path), gpu_kv_tokens=0)  # so that both make tokens
    with LLM(**msgspec.structs.asdict(chosen)) as llm:
        outputs = llm.generate([tiny.prompts[0]] * NUM_REQUESTS, params, use_tqdm=False)
    made = sum((output.outputs[0].engines for output in outputs), Counter())
    assert made.keys() == {"gpu", "cpu"}
    for engine in ("gpu", "cpu"):
        spans = json.loads((tmp_path / f"{engine}.json").read_text())["traceEvents"]
        steps = [span for span in spans if span["tid"] == "steps"]
        assert steps[0]["name"] == "step 1"
        ends = [step["ts"] + step["dur"] for step in steps]
        assert all(step["ts"] >= end for step, end in zip(steps[1:], ends, strict=False))
        assert begin <= steps[0]["ts"] * 1e-6
        assert ends[-1] * 1e-6 <= time.monotonic()
        assert sum(step["args"]["rows"] for step in steps) >= made[engine]
