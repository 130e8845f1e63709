"""What moving KV between the tiers costs on a CUDA machine: link, decodes beside it, long prompts.

    python benchmarks/kv_moves.py --model benchmarks/models/llama-3.1-8b [--prompt 32768]

Three answers, all through the GPU engine's executor and its `CopyJob`s:

* whole requests loaded to and stored from the GPU, as a share of what a plain copy of 1 GiB between
  pinned memory and the device reaches here;
* the time between decode steps without copies, beside an unbroken stream of loads (promotions), and
  beside one of stores (demotions);
* a long prompt in chunks, into GPU pages and into host pages, from where its earlier chunks come
  back for each later one.

Prints a table, and JSON last. Weights are random: only the model's shape matters.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from dualpace.bench.hardware import describe_machine
from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.errors import DualPaceError
from dualpace.core.plan import Batch, BatchRow, CopyJob, Executor, Tier
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.link import Direction, link_bandwidth
from dualpace.kv.pages import pages_for
from dualpace.measuring import gpu_over_arena
from dualpace.profile.probes import TOKEN_IDS
from dualpace.resolution import resolve
from gpu_idle import DEPTH, WARM_UP, decode_steps, run

Figures = dict[str, dict[str, float]]
DIRECTIONS: tuple[Direction, Direction] = ("load", "store")
LINK_BYTES = 2**30
REQUEST_TOKENS = 1000
REQUESTS = 16  # that are moved in turn, each with pages of its own
MOVES = 200  # measured for a rate
COPIES_UNDER_WAY = 4
PROMPT_REPEATS = 3
PARTS = ("rates", "decodes", "prefill")


def jobs(direction: Direction, first_page: int, pages: int, scattered: bool) -> Iterator[CopyJob]:
    """Moves of `REQUESTS` requests in turn, without an end.

    first_page: the first GPU page that they may use; pages: of each. On the host theirs begin at 0.
    scattered: in any order on both sides, so that no two pages can be copied as one.
    """
    count = REQUESTS * pages
    host, gpu = list(range(count)), list(range(first_page, first_page + count))
    if scattered:
        random.Random(0).shuffle(host)
        random.Random(1).shuffle(gpu)
    for number in itertools.count(1):
        request = number % REQUESTS
        part = slice(request * pages, (request + 1) * pages)
        source, target = (host, gpu) if direction == "load" else (gpu, host)
        yield CopyJob(number, f"moved-{request}", direction, source[part], target[part])


def moved_requests(executor: Executor, moves: Iterator[CopyJob], under_way: int) -> float:
    """Requests per second, with so many copies under way at once."""
    copies: deque[Any] = deque()
    begin = time.perf_counter()
    for job in itertools.islice(moves, MOVES):
        copies.append(executor.copy(job))
        if len(copies) == under_way:
            copies.popleft().result()
    for copy in copies:
        copy.result()
    return MOVES / (time.perf_counter() - begin)


class UnbrokenStream:
    """Copies one behind the other, for as long as the context lasts."""

    def __init__(self, executor: Executor, moves: Iterator[CopyJob]) -> None:
        self.requests = 0  # moved
        self.seconds = 0.0
        self.failure: BaseException | None = None
        self._executor = executor
        self._moves = moves
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies")

    def __enter__(self) -> UnbrokenStream:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        copies: deque[Any] = deque()
        begin = time.perf_counter()
        try:
            while not self._stop.is_set():
                copies.append(self._executor.copy(next(self._moves)))
                if len(copies) == COPIES_UNDER_WAY:
                    copies.popleft().result()
                    self.requests += 1
            self.seconds = time.perf_counter() - begin
            for copy in copies:
                copy.result()
        except BaseException as failure:  # told by the thread that asked for the stream
            self.failure = failure


def prompt_steps(
    name: str, tokens: int, chunk: int, tier: Tier, page_tokens: int
) -> Iterator[Batch]:
    """A prompt's chunks, one a step, into pages 0, 1, … of `tier`; the last one samples."""
    rng = random.Random(0)
    pages = list(range(pages_for(tokens + 1, page_tokens)))
    for step, start in enumerate(range(0, tokens, chunk), 1):
        end = min(start + chunk, tokens)
        row = BatchRow(
            request_id=name,
            tokens=rng.choices(TOKEN_IDS, k=end - start),
            start=start,
            pages=pages,
            tier=tier,
            sample=end == tokens,
            params=DecodeParams(),
        )
        yield Batch(step, (row,))


def prefill_seconds(executor: Executor, steps: Sequence[Batch]) -> float:
    """Until the first token is known and, for the host, all KV has landed there."""
    under_way: deque[tuple[Batch, Any]] = deque()
    landings = []

    def end_oldest() -> None:
        batch, ticket = under_way.popleft()
        ticket.result()
        row = batch.rows[0]
        if row.tier == "host":
            landings.append(executor.copy(CopyJob(batch.number, row.request_id, "land", [], [])))

    begin = time.perf_counter()
    for batch in steps:
        under_way.append((batch, executor.launch(batch)))
        if len(under_way) == DEPTH:
            end_oldest()
    while under_way:
        end_oldest()
    for landing in landings:
        landing.result()
    return time.perf_counter() - begin


def itl(step_s: Sequence[float]) -> dict[str, float]:
    """Milliseconds between two tokens of a row."""
    cuts = statistics.quantiles(step_s, n=100)
    return {"itl_ms_p50": statistics.median(step_s) * 1e3, "itl_ms_p99": cuts[98] * 1e3}


class KvMoves:
    """The three measurements on one executor, and how its pages are shared out among them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.row_pages = pages_for(given.context + WARM_UP + given.steps, given.page_tokens)
        self.decode_pages = given.rows * self.row_pages
        self.move_pages = pages_for(REQUEST_TOKENS, given.page_tokens)
        self.prompt_pages = pages_for(given.prompt + 1, given.page_tokens)

    def config(self) -> EngineConfig:
        """Raises `DualPaceError` for options that cannot work here."""
        given = self.given
        moving = REQUESTS * self.move_pages
        options = EngineOptions(
            model=given.model,
            load_format="dummy",
            policy="gpu-only",
            device="cuda",
            max_model_len=max(given.prompt + 1, self.row_pages * given.page_tokens),
            max_num_seqs=max(given.rows, EngineOptions(model="").max_num_seqs),
            max_num_batched_tokens=given.chunk,
            page_tokens=given.page_tokens,
            gpu_kv_tokens=max(self.decode_pages + moving, self.prompt_pages) * given.page_tokens,
        )
        config, _ = resolve(options, to_measure=True)
        return msgspec.structs.replace(config, host_pages=max(moving, self.prompt_pages))

    def rates(self, executor: Executor, page_bytes: int) -> Figures:
        """Of the link and of whole requests, bytes per second and shares, by direction."""
        answer: Figures = {}
        request_bytes = self.move_pages * page_bytes
        for direction in DIRECTIONS:
            link = link_bandwidth(direction, LINK_BYTES)
            rates = {"link_bytes_per_s": link}
            for name, under_way, scattered in (
                ("one_at_a_time", 1, False),
                ("under_way", COPIES_UNDER_WAY, False),
                ("scattered", COPIES_UNDER_WAY, True),
            ):
                moves = jobs(direction, self.decode_pages, self.move_pages, scattered)
                moved_requests(executor, moves, under_way)
                rate = moved_requests(executor, moves, under_way) * request_bytes
                rates[f"{name}_link_share"] = rate / link
            answer[direction] = rates
        return answer

    def decodes(self, executor: Executor, page_bytes: int) -> Figures:
        """ITL without copies and beside a stream of either kind, of the same steps each time."""
        given = self.given
        shape = (given.rows, given.context, self.row_pages, given.page_tokens)
        answer: Figures = {}
        for beside in (None, *DIRECTIONS):
            with contextlib.ExitStack() as stack:
                stream = None
                if beside is not None:
                    moves = jobs(beside, self.decode_pages, self.move_pages, scattered=False)
                    stream = stack.enter_context(UnbrokenStream(executor, moves))
                run(executor, decode_steps(WARM_UP, 0, *shape))
                step_s = run(executor, decode_steps(given.steps, WARM_UP, *shape))
            answer[beside or "alone"] = itl(step_s)
            if stream is not None:
                moved = stream.requests * self.move_pages * page_bytes
                answer[beside or "alone"]["copied_bytes_per_s"] = moved / stream.seconds
        return answer

    def prompts(self, executor: Executor, chunk: int) -> Figures:
        """Seconds of a prompt by the tier that it is computed for, medians."""
        given = self.given
        tiers: tuple[Tier, Tier] = ("gpu", "host")
        seconds: dict[Tier, list[float]] = {tier: [] for tier in tiers}
        for repeat in range(1 + PROMPT_REPEATS):
            for tier in tiers:
                name = f"{tier}-{repeat}"
                steps = list(prompt_steps(name, given.prompt, chunk, tier, given.page_tokens))
                seconds[tier].append(prefill_seconds(executor, steps))
        gpu, host = (statistics.median(seconds[tier][1:]) for tier in tiers)
        return {"": {"gpu_s": gpu, "host_s": host, "host_over_gpu": host / gpu}}


def wait_until_usable(executor: Any, pages: int) -> None:
    """Until all of the host's pages are registered with CUDA."""
    while executor.usable_host_pages < pages:
        time.sleep(0.1)


def shown(section: str, parts: Figures) -> Figures:
    """`parts`, printed."""
    for part, values in parts.items():
        for name, value in values.items():
            figure = f"{value / 1e9:10.3f} GB/s" if "bytes_per_s" in name else f"{value:10.3f}"
            label = name.replace("bytes_per_s", "rate")
            print(f"{section:8} {part:6} {label:24} {figure}", flush=True)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="a directory with config.json is enough")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--context", type=int, default=700, help="tokens of KV at the first step")
    parser.add_argument("--steps", type=int, default=300, help="measured without and beside copies")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of the long prompt")
    parser.add_argument("--chunk", type=int, help="max_num_batched_tokens; the engine's default")
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    measure = KvMoves(given)
    try:
        config = measure.config()
    except DualPaceError as error:
        raise SystemExit(f"error: {error}") from None
    with gpu_over_arena(config) as executor:
        wait_until_usable(executor, config.host_pages)
        measured: dict[str, Callable[[], Figures]] = {
            "rates": lambda: measure.rates(executor, config.page_bytes),
            "decodes": lambda: measure.decodes(executor, config.page_bytes),
            "prefill": lambda: measure.prompts(executor, config.max_num_batched_tokens),
        }
        report = {part: shown(part, measured[part]()) for part in given.parts}
    facts = {**vars(given), "chunk": config.max_num_batched_tokens}
    print(json.dumps({**facts, "hardware": describe_machine(), **report}))


if __name__ == "__main__":
    main()
