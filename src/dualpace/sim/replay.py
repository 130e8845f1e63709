"""Replays a benchmark's load against a simulated server, and keeps the benchmark's own records.

So `bench.metrics` and `bench.report` measure a simulation exactly as they measure a server. Knows
neither the profile nor the policy that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.core.config import EngineOptions
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.view import Policy
from dualpace.sim.world import Hardware, Stream, World

_DEFAULTS = EngineOptions(model="")


def replay(
    load: Sequence[LoadRequest],
    hardware: Hardware,
    policy: Policy,
    max_rows: int = _DEFAULTS.max_num_seqs,
    max_tokens: int = 2048,
) -> list[RequestRecord]:
    """One record per request, in the order of `load`; times are virtual seconds.

    max_rows and max_tokens bound a step as in the server. Every request gets exactly the output
    length it asks for. One that no tier can hold never ends, and its record says so.
    """
    world = World(hardware, policy, max_rows, max_tokens, check_kv=False)
    order = sorted(range(len(load)), key=lambda index: load[index].arrival_s)
    for arrival, index in enumerate(order):
        asked = load[index]
        params = DecodeParams(max_tokens=asked.output_tokens)
        state = RequestState(f"r{index}", arrival, 0, [0] * asked.prompt_tokens, [], params)
        world.submit(asked.arrival_s, state)
    world.run()
    return [
        _record(index, asked, world.streams[f"r{index}"], world.clock.now)
        for index, asked in enumerate(load)
    ]


def _record(index: int, asked: LoadRequest, stream: Stream, now: float) -> RequestRecord:
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
    else:
        record.error = stream.failed or "it waits for KV room that there is not"
    return record
