"""Measures whole steps of the cost model's kinds through `core.plan.Executor`.

One probe serves every engine, because it says what it wants to run in batches, as a scheduler
would. Knows no engine, no tensors, and not what is done with the points.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dualpace.core.config import EngineConfig
from dualpace.core.plan import Batch, BatchRow, Executor, StepResult, Ticket, Tier
from dualpace.core.sampling import DecodeParams
from dualpace.kv.pages import pages_for
from dualpace.policy.cost_model import WHOLES, Point, Step, Whole

REPEATS = 5
POINT_SHARE = 0.05  # of the time there is; a point that takes longer is repeated less
SMALLEST_CHUNK = 16
SMALLEST_CONTEXT = 16
COMPUTE_BOUND = 128  # tokens of a chunk, about, from which on more of them take longer
# Ids of the tokens that steps are made of, which any vocabulary has. Were they all alike, so would
# be the rows of every matrix, and a GPU at its power limit would be faster than with a text's.
TOKEN_IDS = range(64)
# How many positions of context cost about as much as one more token; orders points, no more.
CONTEXT_PER_TOKEN = 256


@dataclass(frozen=True)
class Room:
    """The KV pages that a probe may use, all of them its own, and the largest batch to measure.

    max_rows: decode rows in a step; max_tokens: positions of a prompt in a step; max_model_len:
    positions of a request.
    """

    tier: Tier
    pages: int
    page_tokens: int
    max_rows: int
    max_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, config: EngineConfig, tier: Tier, pages: int) -> Room:
        """So many pages of a tier, and the largest batch that an engine has with `config`."""
        return cls(
            tier, pages, config.page_tokens, config.max_num_seqs, config.max_num_batched_tokens,
            config.max_model_len,
        )  # fmt: skip

    def longest(self, rows: int) -> int:
        """The most positions that so many rows may have in total."""
        return min(rows * self.max_model_len, (self.pages - rows) * self.page_tokens)


def plan_points(operation: Step | Whole, room: Room) -> list[tuple[int, int]]:
    """(size, context) of the points to measure, in order: the extremes first, then again and again
    what halves the gaps, cheap points before dear ones. So whatever time there is, the table is of
    use."""
    if operation == "gpu_prefill":
        sizes = _doubling(SMALLEST_CHUNK, min(room.max_tokens, room.max_model_len))
        # Where arithmetic is what limits, time goes up by whole tiles: straight lines would err.
        between = (3 * size // 2 for size in sizes[:-1] if size >= COMPUTE_BOUND)
        sizes = sorted({*sizes, *(size for size in between if size < sizes[-1])})
        contexts = [0, *_quadrupling(4 * SMALLEST_CONTEXT, room.max_model_len)]
    else:
        sizes = _doubling(1, room.max_rows)
        most = min(room.pages * room.page_tokens, room.max_rows * room.max_model_len)
        # Near the most, for what a full pool takes; many rows leave it more of their pages unused.
        contexts = sorted({*_quadrupling(SMALLEST_CONTEXT, most), most * 3 // 4, most * 31 // 32})
    ranked = []
    for size, rank in zip(sizes, _halvings(len(sizes)), strict=True):
        fitting = [c for c in contexts if make_batch(operation, size, c, room) is not None]
        ranked += [
            (max(rank, inner), size * CONTEXT_PER_TOKEN + context, (size, context))
            for context, inner in zip(fitting, _halvings(len(fitting)), strict=True)
        ]
    return [point for _, _, point in sorted(ranked)]


def held_out_points(
    operation: Step | Whole, room: Room, count: int, seed: int
) -> list[tuple[int, int]]:
    """(size, context) of up to `count` points that `plan_points` does not have, drawn at random
    within the same bounds: small ones as often as large ones."""
    planned = plan_points(operation, room)
    most_size = max(size for size, _ in planned)
    most_context = max(context for _, context in planned)
    rng = random.Random(seed)
    drawn: list[tuple[int, int]] = []
    for _ in range(20 * count):
        size = round(math.exp(rng.uniform(0.0, math.log(most_size))))
        context = round(math.exp(rng.uniform(0.0, math.log(most_context + 1)))) - 1
        point = (size, context)
        if point in planned or point in drawn or make_batch(operation, *point, room) is None:
            continue
        if operation == "gpu_prefill" and size < SMALLEST_CHUNK:
            continue
        if operation != "gpu_prefill" and context < SMALLEST_CONTEXT:
            continue
        drawn.append(point)
        if len(drawn) == count:
            break
    return drawn


def probe(
    operation: Step | Whole,
    executor: Executor,
    room: Room,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    points: Sequence[tuple[int, int]] | None = None,
    depth: int = 1,
) -> Iterator[Point]:
    """Measure point after point, for about `seconds`; each is yielded as soon as it is known.

    points: (size, context) of each, `plan_points` by default; depth: steps that the engine has
    under way, so that the launch of one is hidden by the one before.

    A point is the median of the times from the end of one step to that of the next, `REPEATS` of
    them and those of what is under way then, or fewer where the time is short.
    Raises what a step raises.
    """
    deadline = clock() + seconds
    for size, context in plan_points(operation, room) if points is None else points:
        if clock() >= deadline:
            return
        batch = make_batch(operation, size, context, room)
        assert batch is not None
        enough = min(deadline, clock() + POINT_SHARE * seconds)

        def stop(ended: int, enough: float = enough) -> bool:
            return ended > REPEATS or (ended > 1 and clock() >= enough)

        ends = list(step_ends(executor, batch, depth, clock, stop))
        times = [after - before for before, after in itertools.pairwise(ends)]
        yield Point(operation, size, context, statistics.median(times))


def step_ends(
    executor: Executor,
    batch: Batch,
    depth: int,
    clock: Callable[[], float],
    stop: Callable[[int], bool],
) -> Iterator[float]:
    """When steps of `batch` end, of which `depth` are under way at a time, until `stop` says so,
    which is told how many have ended."""
    under_way: deque[Ticket[StepResult]] = deque()
    ended = 0
    while under_way or not stop(ended):
        while len(under_way) < depth and not stop(ended):
            under_way.append(executor.launch(batch))
        under_way.popleft().result()
        ended += 1
        yield clock()


def make_batch(operation: Step | Whole, size: int, context: int, room: Room) -> Batch | None:
    """The batch that a point stands for, or None if the room does not allow it.

    Decode: `size` rows that share `context` positions as evenly as whole positions allow.
    Prefill: one chunk of `size` positions after `context` earlier ones.
    """
    if operation == "gpu_prefill":
        chunks = [(size, context)]
    else:
        share, rest = divmod(context, size)
        if share < 1:
            return None
        chunks = [(1, share + (row < rest) - 1) for row in range(size)]
    rng = random.Random(0)
    rows: list[BatchRow] = []
    taken = 0
    for count, start in chunks:
        pages = pages_for(start + count, room.page_tokens)
        if start + count > room.max_model_len or taken + pages > room.pages:
            return None
        rows.append(
            BatchRow(
                request_id=f"probe-{len(rows)}",
                tokens=rng.choices(TOKEN_IDS, k=count),
                start=start,
                pages=list(range(taken, taken + pages)),
                tier=room.tier,
                sample=True,
                params=DecodeParams(),
            )
        )
        taken += pages
    return Batch(1, tuple(rows), route=WHOLES.get(operation, "local"))


def _doubling(first: int, most: int) -> list[int]:
    """first, 2·first, 4·first, … below `most`, and `most` itself."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return [*sizes, most]


def _halvings(count: int) -> list[int]:
    """For each of `count` places, after how many halvings it is one that ends a gap."""
    ranks = [0] * count
    gaps = [(0, count - 1)]
    rank = 0
    while gaps := [(low, high) for low, high in gaps if high - low > 1]:
        rank += 1
        for low, high in gaps:
            ranks[(low + high) // 2] = rank
        gaps = [
            gap
            for low, high in gaps
            for gap in ((low, (low + high) // 2), ((low + high) // 2, high))
        ]
    return ranks


def _quadrupling(first: int, most: int) -> list[int]:
    """first, 4·first, 16·first, … up to `most`."""
    contexts = []
    while first <= most:
        contexts.append(first)
        first *= 4
    return contexts
