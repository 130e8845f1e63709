"""How much of its time the GPU idles in steady decode, by the timestamps of its own kernels.

    python benchmarks/gpu_idle.py --model benchmarks/models/llama-3.1-8b [--rows 48] [--context 700]

Launches decode batches back to back through the GPU engine's executor, two deep as the engine's
loop does, first by themselves and then under torch's profiler. Prints busy and idle shares and the
median step, and JSON last. Weights are random: only the model's shape matters.

The profiler itself widens the gaps between kernels, but hardly the kernels. So there are two
answers: the gaps as the profiler saw them, an upper bound that tells between-step gaps from short
ones, and `idle_share`, which sets the kernels' time against the steps that ran unobserved.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dualpace.bench.hardware import describe_machine
from dualpace.core.config import EngineOptions
from dualpace.core.plan import Batch, BatchRow, Executor
from dualpace.core.sampling import DecodeParams
from dualpace.kv.pages import pages_for
from dualpace.measuring import profile_executors
from dualpace.resolution import resolve

DEPTH = 2  # steps launched before the first of them is done
WARM_UP = 20
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of kineto's trace
LONG_GAP_US = 10.0  # what no launch within a step takes: the host was waited for


def decode_steps(
    count: int, first: int, rows: int, context: int, pages: int, page_tokens: int
) -> Iterator[Batch]:
    """Steps `first`, `first` + 1, … of `rows` requests that began with `context` tokens of KV.

    pages: pages of each request's own, enough for its last step.
    """
    for step in range(first, first + count):
        end = context + step
        yield Batch(
            number=step + 1,
            rows=tuple(
                BatchRow(
                    request_id=f"row-{row}",
                    tokens=[7],
                    start=end - 1,
                    pages=list(range(row * pages, row * pages + pages_for(end, page_tokens))),
                    tier="gpu",
                    sample=True,
                    params=DecodeParams(),
                )
                for row in range(rows)
            ),
        )


def run(executor: Executor, batches: Iterable[Batch]) -> list[float]:
    """Run all of them, `DEPTH` at a time; seconds from each completion to the next."""
    under_way: deque[Any] = deque()
    done = []
    for batch in batches:
        under_way.append(executor.launch(batch))
        if len(under_way) == DEPTH:
            under_way.popleft().result()
            done.append(time.perf_counter())
    for ticket in under_way:
        ticket.result()
        done.append(time.perf_counter())
    return [later - sooner for sooner, later in itertools.pairwise(done)]


def profiled(executor: Executor, batches: Iterable[Batch]) -> list[tuple[float, float]]:
    """Run them under the profiler; begin and end in µs of all that ran on the GPU."""
    import torch  # slow to import, and only this needs it

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(executor, batches)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in ON_GPU
    ]


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in order."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def summarize(
    intervals: list[tuple[float, float]], steps: int, step_s: list[float]
) -> dict[str, float]:
    """intervals: µs, of `steps` profiled steps; step_s: seconds of steps without the profiler."""
    union = merged(intervals)
    busy = sum(end - begin for begin, end in union)
    span = union[-1][1] - union[0][0]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(union)]
    long_gaps = [gap for gap in gaps if gap >= LONG_GAP_US]
    step_us = statistics.median(step_s) * 1e6
    return {
        "step_ms_p50": step_us / 1e3,
        "busy_ms_per_step": busy / steps / 1e3,
        "busy_share": busy / steps / step_us,
        "idle_share": 1.0 - busy / steps / step_us,
        "profiled_step_ms": span / steps / 1e3,
        "profiled_idle_share": 1.0 - busy / span,
        "profiled_idle_share_in_long_gaps": sum(long_gaps) / span,
        "long_gaps_per_step": len(long_gaps) / steps,
        "long_gap_us_p50": statistics.median(long_gaps) if long_gaps else 0.0,
        "gpu_activities_per_step": len(intervals) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="a directory with config.json is enough")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--context", type=int, default=700, help="tokens of KV at the first step")
    parser.add_argument("--steps", type=int, default=200, help="measured with and without profiler")
    parser.add_argument("--page-tokens", type=int, default=32)
    given = parser.parse_args()
    steps = given.steps
    pages = pages_for(given.context + WARM_UP + 2 * steps, given.page_tokens)
    options = EngineOptions(
        model=given.model,
        load_format="dummy",
        policy="gpu-only",
        device="cuda",
        max_num_seqs=max(given.rows, EngineOptions(model="").max_num_seqs),
        page_tokens=given.page_tokens,
        gpu_kv_tokens=given.rows * pages * given.page_tokens,
    )
    config, _ = resolve(options)
    shape = (given.rows, given.context, pages, given.page_tokens)
    with contextlib.closing(profile_executors(config)) as executors:
        executor = next(executors).executor
        run(executor, decode_steps(WARM_UP, 0, *shape))
        step_s = run(executor, decode_steps(steps, WARM_UP, *shape))
        intervals = profiled(executor, decode_steps(steps, WARM_UP + steps, *shape))
    if not intervals:
        raise SystemExit("the profiler saw nothing on the GPU")
    report = summarize(intervals, steps, step_s)
    for name, value in report.items():
        print(f"{name:34} {value:10.3f}")
    facts = {"model": given.model, "rows": given.rows, "context": given.context, "steps": steps}
    print(json.dumps({**facts, "hardware": describe_machine(), **report}))


if __name__ == "__main__":
    main()
