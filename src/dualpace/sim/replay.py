"""Replays a benchmark's load against a simulated server, and keeps the benchmark's own records.

So `bench.metrics` and `bench.report` measure a simulation exactly as they measure a server. Knows
neither the profile nor the policy that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.replay import Progress
from dualpace.core.config import EngineOptions
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.view import Policy
from dualpace.sim.world import Hardware, Stream, World

MAX_ROWS = EngineOptions(model="").max_num_seqs  # of a step, as in the server


def replay(
    load: Sequence[LoadRequest],
    hardware: Hardware,
    policy: Policy,
    max_tokens: int = 2048,
    *,
    max_concurrency: int | None = None,
    seconds: float | None = None,
    whole_prompts: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[RequestRecord]:
    """One record per request that was sent, in the order of `load`; times are virtual seconds.

    `MAX_ROWS` and max_tokens bound a step as in the server, max_concurrency the requests in flight;
    the replay is cut off after `seconds`, if given; a gated step takes `whole_prompts` as `World`
    says. Every request gets exactly the output length it asks for. One that no tier can hold never
    ends, and its record says so. on_progress is called at the end of each, with its tokens counted
    then.
    """
    world = World(
        hardware, policy, MAX_ROWS, max_tokens, check_kv=False, whole_prompts=whole_prompts
    )
    arrivals = enumerate(sorted(range(len(load)), key=lambda index: load[index].arrival_s))

    def send_next() -> None:
        for arrival, index in arrivals:
            asked = load[index]
            params = DecodeParams(max_tokens=asked.output_tokens)
            state = RequestState(f"r{index}", arrival, 0, [0] * asked.prompt_tokens, [], params)
            world.submit(max(asked.arrival_s, world.clock.now), state)
            return

    finished = failed = tokens = 0

    def ended(stream: Stream) -> None:
        nonlocal finished, failed, tokens
        send_next()
        finished += 1
        failed += stream.failed is not None
        tokens += len(stream.tokens)
        on_progress(Progress(len(world.streams), finished, failed, tokens))

    for _ in range(min(max_concurrency or len(load), len(load))):
        send_next()
    world.on_end = ended
    world.run(math.inf if seconds is None else seconds)
    return [
        _record(index, asked, world.streams[f"r{index}"], world.clock.now, seconds is not None)
        for index, asked in enumerate(load)
        if f"r{index}" in world.streams
    ]


def _record(index: int, asked: LoadRequest, stream: Stream, now: float, cut: bool) -> RequestRecord:
    """cut: the replay ended before everything was answered."""
    tokens = [stream.tokens[number] for number in range(len(stream.received))]
    complete = stream.count == len(tokens)
    record = RequestRecord(
        request=asked,
        sent_s=stream.sent_at,
        end_s=tokens[-1][1] if complete else now,
        prompt_tokens=asked.prompt_tokens,
        chunks=[Chunk(time, 1, engine) for _, time, engine in tokens],
        index=index,
    )
    if complete:
        record.finish_reason = "length"
    elif cut and stream.failed is None:
        record.cut = True
    else:
        record.error = stream.failed or "it waits for KV room that there is not"
    return record
