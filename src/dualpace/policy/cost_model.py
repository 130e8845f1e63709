"""How long an engine's step takes, from measured points of its parts: pure.

Knows operations, sizes and seconds. Does not know what was measured on which machine (that is the
profile's) and has no opinion on what to do with an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, Protocol, get_args

import msgspec

from dualpace.core.errors import ConfigError
from dualpace.core.plan import Route
from dualpace.policy.surface import Estimate, Surface

Step = Literal["cpu_iteration", "gpu_decode", "gpu_prefill"]
Part = Literal[
    "cpu_attention",
    "assist", "assist_beside_prefill", "assist_stolen", "assist_stolen_beside_prefill",
    "assist2", "assist2_beside_prefill", "assist2_stolen", "assist2_stolen_beside_prefill",
]  # fmt: skip
Whole = Literal["assisted", "assisted2"]
Operation = Step | Part | Whole
OPERATIONS: tuple[Step, ...] = get_args(Step)  # what an engine can be asked to run
PARTS: tuple[Part, ...] = get_args(Part)  # of a CPU iteration whose dense work the GPU does
# What such parts must add up to, by the route that has them: measured to check a profile.
WHOLES: dict[Operation, Route] = {"assisted": "assist", "assisted2": "assist2"}
# Dense work does not depend on the context: measured by rows alone, at context 0, but for what it
# takes from prompts.
GPU_PARTS: frozenset[Operation] = frozenset(PARTS[1:])

SMALL_STEP = 8  # tiles
MOST_STOLEN = 0.9  # of the GPU's time: assists leave it some of it
MAX_SIZE = 10**12  # tokens or rows: sums of them stay exact in float64

Chunk = tuple[int, int]  # tokens of a prompt in a step, and those computed before


class Point(msgspec.Struct, frozen=True):
    """One measurement. What size and context count is told by `CostModel`'s methods; what is read
    from a file is within these bounds."""

    operation: Operation
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
    context: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class CostModel(Protocol):
    """Durations never decrease in either argument. Raises `ConfigError` for an operation of which
    there are too few measurements."""

    def cpu_iteration(self, rows: int, context: int) -> Estimate:
        """A CPU iteration of `rows` rows that attend to `context` positions in total."""
        ...

    def gpu_decode(self, rows: int, context: int) -> Estimate:
        """A GPU step of `rows` decode rows that attend to `context` positions in total."""
        ...

    def gpu_prefill(self, tokens: int, context: int) -> Estimate:
        """A GPU step of one prompt chunk: `tokens` positions after `context` computed ones."""
        ...

    def cpu_attention(self, rows: int, context: int) -> Estimate:
        """The attention of all layers of a CPU iteration, without its dense work."""
        ...

    def assist(self, rows: int, prefill_share: float, slots: int = 1) -> Estimate:
        """The dense work of all layers of a CPU iteration of `rows` rows on the GPU, there and
        back, beside GPU steps that spend `prefill_share` of their time on prompts. On two slots:
        of both halves, while the CPU attends to next to nothing in between."""
        ...

    def assist_stolen(
        self, rows: int, context: int, prefill_share: float, slots: int = 1
    ) -> Estimate:
        """By how much such dense work delays the GPU's own steps, where the rows attend to
        `context` positions in total: prompts may lose more, the further apart assists come."""
        ...

    def covers(self, *operations: Operation) -> bool:
        """True if all of these can be asked for."""
        ...


def gpu_step(costs: CostModel, rows: int, context: int, chunks: Sequence[Chunk]) -> Estimate:
    """A GPU step of `rows` decode rows over `context` positions, and of prompt `chunks`."""
    return GpuSteps(costs, rows, context).beside(chunks)


class GpuSteps:
    """GPU steps of `rows` decode rows over `context` positions, and of this prompt or that.

    All of a step goes through the dense layers together, as one prompt of so many tokens would;
    what each part attends to comes on top. Each part's attention is what its context adds to its
    time.
    """

    def __init__(self, costs: CostModel, rows: int, context: int) -> None:
        self._costs = costs
        self._rows = rows
        self.decodes = costs.gpu_decode(rows, context) if rows else Estimate(0.0, False)
        self._bare = costs.gpu_decode(rows, 0).seconds if rows else 0.0

    def beside(self, chunks: Sequence[Chunk]) -> Estimate:
        """A step of the decode rows and of prompt `chunks`."""
        if not chunks:
            return self.decodes
        tokens = self._rows + sum(tokens for tokens, _ in chunks)
        dense, earlier = self._costs.gpu_prefill(tokens, 0), earlier_context(self._costs, chunks)
        # Least contexts are never measured exactly; that they are held is no extrapolation.
        seconds = dense.seconds + earlier.seconds + self.decodes.seconds - self._bare
        parts = (dense, earlier, self.decodes)
        return Estimate(seconds, any(part.extrapolated for part in parts))


def earlier_context(costs: CostModel, chunks: Sequence[Chunk]) -> Estimate:
    """What it takes prompt `chunks` to attend to the positions computed before them."""
    seconds, extrapolated = 0.0, False
    for tokens, start in chunks:
        if start:
            whole, bare = costs.gpu_prefill(tokens, start), costs.gpu_prefill(tokens, 0)
            seconds += whole.seconds - bare.seconds
            extrapolated = extrapolated or whole.extrapolated or bare.extrapolated
    return Estimate(seconds, extrapolated)


def cpu_step(
    costs: CostModel, route: Route, rows: int, context: int, prefill_share: float
) -> Estimate:
    """A CPU iteration by `route`, beside GPU steps that spend `prefill_share` of their time on
    prompts.

    Of two halves either waits for the slowest of three: both attentions, since the CPU attends to
    one half at a time; its own attention and then its dense work; the GPU, which has both to do.
    """
    if route == "local":
        return costs.cpu_iteration(rows, context)
    if route == "assist" or rows < 2:  # a single row has no halves
        attention, dense = costs.cpu_attention(rows, context), costs.assist(rows, prefill_share)
        seconds = attention.seconds + dense.seconds
    else:
        half = -(-rows // 2)
        attention, turn = costs.cpu_attention(half, context // 2), costs.assist(half, prefill_share)
        dense = costs.assist(rows, prefill_share, slots=2)
        waits = attention.seconds + max(attention.seconds, turn.seconds)
        seconds = max(waits, dense.seconds)
    return Estimate(seconds, attention.extrapolated or dense.extrapolated)


def stolen(costs: CostModel, route: Route, rows: int, context: int, prefill_share: float) -> float:
    """GPU seconds that a CPU iteration by `route` takes from the GPU's own steps, which spend
    `prefill_share` of their time on prompts."""
    if route == "local":
        return 0.0
    slots = 2 if route == "assist2" else 1
    return costs.assist_stolen(rows, context, prefill_share, slots).seconds


def stolen_share(
    costs: CostModel, route: Route, rows: int, context: int, prefill_share: float
) -> float:
    """The part of the GPU's time that CPU iterations by `route` take, one after the other; at most
    `MOST_STOLEN`."""
    seconds = cpu_step(costs, route, rows, context, prefill_share).seconds
    taken = stolen(costs, route, rows, context, prefill_share)
    return min(taken / max(seconds, 1e-9), MOST_STOLEN)


# By slots; beside decodes, beside prompts.
_ASSISTS: dict[int, tuple[Operation, Operation]] = {
    1: ("assist", "assist_beside_prefill"),
    2: ("assist2", "assist2_beside_prefill"),
}
_STOLEN: dict[int, tuple[Operation, Operation]] = {
    1: ("assist_stolen", "assist_stolen_beside_prefill"),
    2: ("assist2_stolen", "assist2_stolen_beside_prefill"),
}


class TableCostModel:
    """A `CostModel` that interpolates between measured points. Two slots that were not measured
    are taken for twice one with half of the rows.

    tile: tokens of a step with prompts that dense kernels compute together, if they do; twice as
    many in steps of more than `SMALL_STEP` tiles, for which there are larger kernels.
    """

    def __init__(self, points: Iterable[Point], tile: int | None = None) -> None:
        self._tile = tile
        by_operation: defaultdict[Operation, list[Point]] = defaultdict(list)
        points = list(points)
        for point in (*points, *_stolen_from_prompts(points)):
            by_operation[point.operation].append(point)
        for operation in by_operation.keys() & GPU_PARTS:
            measured = by_operation[operation]
            if not any(point.context for point in measured):  # level, however long the context
                level = [msgspec.structs.replace(point, context=MAX_SIZE) for point in measured]
                measured += level
        self._surfaces = {
            operation: Surface([(p.size, p.context, p.seconds) for p in measured])
            for operation, measured in by_operation.items()
            if len({p.size for p in measured}) > 1 and len({p.context for p in measured}) > 1
        }

    def cpu_iteration(self, rows: int, context: int) -> Estimate:
        return self._surface("cpu_iteration").at(rows, context)

    def gpu_decode(self, rows: int, context: int) -> Estimate:
        return self._surface("gpu_decode").at(rows, context)

    def gpu_prefill(self, tokens: int, context: int) -> Estimate:
        return self._surface("gpu_prefill").at(self._whole_tiles(tokens), context)

    def _whole_tiles(self, tokens: int) -> int:
        """As many tokens as are computed where so many are asked for. What fits into a single tile
        takes its own time: that of reading weights, more or less."""
        if self._tile is None or tokens <= self._tile:
            return tokens
        tile = self._tile if tokens <= SMALL_STEP * self._tile else 2 * self._tile
        return -(-tokens // tile) * tile

    def cpu_attention(self, rows: int, context: int) -> Estimate:
        return self._surface("cpu_attention").at(rows, context)

    def assist(self, rows: int, prefill_share: float, slots: int = 1) -> Estimate:
        if slots == 2 and "assist2" not in self._surfaces:
            return _twice(self.assist(-(-rows // 2), prefill_share))
        return self._between(_ASSISTS[slots], rows, 0, prefill_share)

    def assist_stolen(
        self, rows: int, context: int, prefill_share: float, slots: int = 1
    ) -> Estimate:
        if slots == 2 and "assist2_stolen" not in self._surfaces:
            return _twice(self.assist_stolen(-(-rows // 2), context // 2, prefill_share))
        return self._between(_STOLEN[slots], rows, context, prefill_share)

    def _between(
        self, names: tuple[Operation, Operation], rows: int, context: int, prefill_share: float
    ) -> Estimate:
        """Between what it is beside decodes and what it is beside prompts, which is no less, and
        the same where that was not measured."""
        decodes, prompts = names
        seconds, extrapolated = self._surface(decodes).at(rows, context)
        if prefill_share and prompts in self._surfaces:
            slowed = self._surface(prompts).at(rows, context)
            seconds += prefill_share * max(0.0, slowed.seconds - seconds)
            extrapolated = extrapolated or slowed.extrapolated
        return Estimate(seconds, extrapolated)

    def covers(self, *operations: Operation) -> bool:
        return self._surfaces.keys() >= set(operations)

    def _surface(self, operation: Operation) -> Surface:
        surface = self._surfaces.get(operation)
        if surface is None:
            raise ConfigError(
                f"the profile has too few points of {operation}: it takes two sizes and two "
                "contexts (measure for longer, or with more KV room)"
            )
        return surface


def _stolen_from_prompts(points: Sequence[Point]) -> Iterator[Point]:
    """What assists take from prompts, where little but what they take from decodes was measured:
    more, in proportion to how much longer beside prompts they take themselves."""
    seconds = {(point.operation, point.size): point.seconds for point in points}
    for slots, (from_decodes, from_prompts) in _STOLEN.items():
        measured = {point.size for point in points if point.operation == from_prompts}
        if len(measured) > 1:
            continue
        alone, beside = _ASSISTS[slots]
        for operation, size in seconds:
            quick, slowed = seconds.get((alone, size), 0.0), seconds.get((beside, size), 0.0)
            if operation == from_decodes and size not in measured and quick and slowed:
                taken = seconds[from_decodes, size] * max(1.0, slowed / quick)
                yield Point(from_prompts, size, 0, taken)


def _twice(half: Estimate) -> Estimate:
    return Estimate(2 * half.seconds, half.extrapolated)
