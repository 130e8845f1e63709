"""Probes on an executor of known speed, with a clock that only it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from dualpace.core.plan import Batch, CopyJob, StepResult
from dualpace.kv.pages import pages_for
from dualpace.policy.cost_model import OPERATIONS, Operation, Point
from dualpace.profile.probes import REPEATS, Room, make_batch, plan_points, probe

ROOM = Room("host", pages=200, page_tokens=16, max_rows=24, max_tokens=100, max_model_len=500)


class FakeExecutor:
    """Takes `seconds(batch, run)`; `run` counts the runs of that batch from 0."""

    def __init__(self, seconds: Callable[[Batch, int], float]) -> None:
        self.now = 0.0
        self.batches: list[Batch] = []
        self._seconds = seconds
        self._runs: Counter[int] = Counter()

    def clock(self) -> float:
        return self.now

    def launch(self, batch: Batch) -> Future[list[int | None]]:
        self.now += self._seconds(batch, self._runs[id(batch)])
        self._runs[id(batch)] += 1
        self.batches.append(batch)  # kept, so that ids stay unique
        ticket: Future[list[int | None]] = Future()
        ticket.set_result(StepResult([0] * len(batch.rows)))
        return ticket

    def copy(self, job: CopyJob) -> Future[None]:
        raise AssertionError("a probe copies nothing")

    def close(self) -> None:
        pass


def duration(batch: Batch) -> float:
    return 2.0**-6 * batch.num_tokens + 2.0**-10 * sum(row.end for row in batch.rows)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_point_is_the_median_after_warming_up(operation: Operation) -> None:
    factors = (100.0, 1.0, 7.0, 1.0, 9.0, 1.0)
    executor = FakeExecutor(lambda batch, run: factors[run] * duration(batch))
    points = list(probe(operation, executor, ROOM, 1e9, executor.clock))
    assert [(point.size, point.context) for point in points] == plan_points(operation, ROOM)
    assert len(executor.batches) == len(points) * (1 + REPEATS)
    for point in points:
        batch = make_batch(operation, point.size, point.context, ROOM)
        assert batch is not None
        assert point.operation == operation
        assert point.seconds == pytest.approx(duration(batch))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("pages", [5, 200])
def test_batches_keep_to_the_room_and_share_no_page(operation: Operation, pages: int) -> None:
    room = Room("gpu", pages, 16, max_rows=24, max_tokens=100, max_model_len=500)
    points = plan_points(operation, room)
    assert len({size for size, _ in points}) > 1
    assert len({context for _, context in points}) > 1
    for size, context in points:
        batch = make_batch(operation, size, context, room)
        assert batch is not None
        used = [page for row in batch.rows for page in row.pages]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(pages))
        for row in batch.rows:
            assert row.end <= room.max_model_len
            assert len(row.pages) == pages_for(row.end, room.page_tokens)
        tokens = [token for row in batch.rows for token in row.tokens]
        assert len(tokens) < 16 or len(set(tokens)) > 4  # no matrix with rows that are all alike
        if operation == "gpu_prefill":
            assert [(len(row.tokens), row.start) for row in batch.rows] == [(size, context)]
            assert size <= room.max_tokens
        else:
            assert len(batch.rows) == size <= room.max_rows
            assert sum(row.end for row in batch.rows) == context
            assert {len(row.tokens) for row in batch.rows} == {1}


def test_a_short_budget_still_spans_the_sizes() -> None:
    plan = plan_points("cpu_iteration", ROOM)
    executor = FakeExecutor(lambda batch, run: 1.0)
    points = list(probe("cpu_iteration", executor, ROOM, 4.5 * len(plan), executor.clock))
    assert [(point.size, point.context) for point in points] == plan[: len(points)]
    assert len(points) < len(plan)
    sizes = {point.size for point in points}
    assert {1, ROOM.max_rows} <= sizes


def test_an_interruption_costs_the_point_that_was_being_measured() -> None:
    def seconds(batch: Batch, run: int) -> float:
        if len(executor.batches) == 2 * (1 + REPEATS) + 3:
            raise KeyboardInterrupt
        return 1.0

    executor = FakeExecutor(seconds)
    points: list[Point] = []
    with pytest.raises(KeyboardInterrupt):
        points.extend(probe("gpu_decode", executor, ROOM, 1e9, executor.clock))
    assert len(points) == 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_time_there_is_the_extremes_are_measured(operation: Operation) -> None:
    points = plan_points(operation, ROOM)
    sizes = sorted({size for size, _ in points})
    corners = {
        corner(context for size, context in points if size == extreme)
        for extreme in (sizes[0], sizes[-1])
        for corner in (min, max)
    }
    first = points[:4]
    assert {size for size, _ in first} == {sizes[0], sizes[-1]}
    assert {context for _, context in first} == corners


class Pipeline(FakeExecutor):
    """A step takes a second of the device, and its launch half a second of the host before."""

    def __init__(self) -> None:
        super().__init__(lambda batch, run: 0.5)
        self.free_at = 0.0

    def launch(self, batch: Batch) -> Future[list[int | None]]:
        super().launch(batch)
        self.free_at = end = max(self.free_at, self.now) + 1.0
        ticket: Future[list[int | None]] = Future()

        def result(timeout: float | None = None) -> StepResult:
            self.now = max(self.now, end)
            return StepResult([0] * len(batch.rows))

        ticket.result = result  # type: ignore[method-assign,assignment]
        return ticket


@pytest.mark.parametrize(("depth", "seconds"), [(1, 1.5), (2, 1.0)])
def test_a_launch_costs_nothing_where_the_engine_hides_it(depth: int, seconds: float) -> None:
    executor = Pipeline()
    for point in probe("gpu_decode", executor, ROOM, 1e9, executor.clock, depth=depth):
        assert point.seconds == pytest.approx(seconds)
