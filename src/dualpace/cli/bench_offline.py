"""`dualpace bench offline`: what `bench serve` measures, with the engines but without HTTP.

The client is a coroutine per request on the frontend's own event loop, so that a token's arrival is
the moment at which a Python program would have it. What it shares with `bench serve` is in
`cli.load_flags`, `cli.replays` and `cli.reports`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Unpack

import typer
from rich.console import Console

from dualpace.bench.hardware import describe_machine
from dualpace.bench.load import LoadRequest
from dualpace.bench.provenance import describe_version
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.replay import Course, Tally, replay
from dualpace.bench.report import Circumstances
from dualpace.cli.errors import explained
from dualpace.cli.load_flags import Load, LoadFlags
from dualpace.cli.logs import level_of, set_up_logging
from dualpace.cli.options import MODEL_HELP, EngineFlags, LogLevel, takes_options
from dualpace.cli.replays import Measurement, PaceFlags, today
from dualpace.cli.reports import Hardware, Outcome, ReportFlags, publish
from dualpace.core.config import EngineOptions
from dualpace.core.garbage import frozen_heap
from dualpace.core.messages import CPU, GPU
from dualpace.core.sampling import SamplingParams
from dualpace.models.registry import has_tokenizer, resolve
from dualpace.policy.roof import find_roof
from dualpace.profile.settle import host_rules
from dualpace.resolution import ELEMENT_BYTES
from dualpace.server.frontend import Frontend
from dualpace.wiring import Server


@takes_options
def offline(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    load_flags: LoadFlags,
    pace: PaceFlags,
    files: ReportFlags,
    engines: EngineFlags,
    log_level: LogLevel = "warning",
    hardware: Hardware = None,
) -> None:
    """Replay a load against engines in this program; print a table, and a JSON line last.

    --seed is that of lengths, arrivals, prompts and dummy weights. A checkpoint without tokenizer
    files runs without a tokenizer. Exits with 1 if no request succeeded. Ctrl-C ends the replay
    and reports what there is.
    """
    set_up_logging(level_of(log_level))
    errors = Console(stderr=True)
    with explained():
        loads = load_flags.build()
        files.check(loads)
        pace.check()
        if engines.tokenizer is None and not has_tokenizer(resolve(model)):
            engines = dataclasses.replace(engines, skip_tokenizer_init=True)
        options = engines.options(model)
        measurements, facts = asyncio.run(_measure(options, loads, pace, errors))
        rooms = f"KV room {facts['gpu_kv_tokens']} + {facts['host_kv_tokens']}"
        outcomes = [
            Outcome(
                Circumstances(
                    model=options.served_model_name or model,
                    base_url="",
                    hardware=hardware or describe_machine(),
                    date=today(),
                    load=f"{measurement.load.text}{pace.text}; {options.policy}, {rooms}",
                    version=describe_version(),
                    label=files.label or options.policy,
                    source=measurement.load.source,
                    request_rate=measurement.load.request_rate,
                ),
                measurement.records,
                measurement.window,
                facts,
            )
            for measurement in measurements
        ]
        publish(
            outcomes,
            files,
            errors,
            is_sweep=len(loads) > 1,
            interrupted=measurements[-1].interrupted,
        )


async def _measure(
    options: EngineOptions, loads: Sequence[Load], pace: PaceFlags, console: Console
) -> tuple[list[Measurement], dict[str, Any]]:
    """A measurement of each load up to Ctrl-C, and what they were measured on."""
    with console.status("starting the engines"):
        server = await Server.start(options)
    try:
        frontend, config = server.frontend, server.config
        facts: dict[str, Any] = {
            "offline": True,
            "policy": config.policy,
            "device": config.device,
            "dtype": config.dtype,
            "gpu_kv_tokens": frontend.kv_tokens[GPU],
            "host_kv_tokens": frontend.kv_tokens.get(CPU, 0),
            "detokenized": not options.skip_tokenizer_init,
        }
        loads = [load.clipped(frontend.longest) for load in loads]
        facts["roof"] = _roof(server, loads[0], console)  # a sweep's loads are equally long
        measurements = []
        for load in loads:
            measurement = Measurement(load, pace, server.spec.vocab_size, options.seed)
            measurements.append(measurement)
            await measurement.run(partial(replay_in_process, frontend), console)
            if measurement.interrupted:
                break
    finally:
        await server.close()
    return measurements, facts


def _roof(server: Server, load: Load, console: Console) -> dict[str, float] | None:
    """What the profile says could be had at best, for requests as long as the load's are when half
    of their output is there; None without a profile or under another policy than `dualpace`."""
    config, rooms = server.config, server.frontend.kv_tokens
    if config.policy != "dualpace":
        return None
    rules = host_rules(config, server.spec.num_parameters * ELEMENT_BYTES[config.dtype])
    if config.profile_file is None or rules is None:
        return None
    context = round(
        statistics.fmean(each.prompt_tokens + each.output_tokens / 2 for each in load.requests)
    )
    roof = find_roof(rules, rooms[GPU], rooms.get(CPU, 0), config.max_num_seqs, context)
    if roof is None:
        return None
    console.print(
        f"requests of {context} tokens: h = {roof.host_rate:.0f} tok/s on the host, G0 = "
        f"{roof.gpu_rate:.0f} on the GPU, a = {roof.stolen_share:.1%} of it for assists: "
        f"at best {roof.ratio:.2f} times the GPU alone"
    )
    return {**roof._asdict(), "ratio": roof.ratio, "context": float(context)}


async def replay_in_process(
    frontend: Frontend,
    load: Sequence[LoadRequest],
    prompts: Sequence[list[int]],
    **course: Unpack[Course],
) -> list[RequestRecord]:
    """`bench.replay.replay` against a frontend. prompts: token ids, one list per request."""

    async def send(index: int, record: RequestRecord, tally: Tally) -> None:
        count = record.request.output_tokens
        params = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True
        )
        stream = frontend.submit([prompts[index]], params)
        try:
            while deltas := await stream.take():
                now = tally.now()
                for delta in deltas:
                    if tokens := len(delta.token_ids):
                        record.chunks.append(Chunk(now, tokens, delta.engine))
                        tally.add_tokens(tokens, now)
                    record.finish_reason = delta.finish_reason
        finally:
            stream.close()

    with frozen_heap():
        return await replay(load, send, **course)
