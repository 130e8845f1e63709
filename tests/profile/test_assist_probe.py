"""The parts of an assisted iteration, told apart on executors of known speed."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dualpace.core.plan import Batch, CopyJob, StepResult
from dualpace.policy.cost_model import WHOLES, TableCostModel, Whole
from dualpace.policy.host import runnable
from dualpace.profile import assist_probe, beside
from dualpace.profile.assist_probe import probe_assisted, probe_assists
from dualpace.profile.beside import DEPTH, Beside
from dualpace.profile.check import accuracy
from dualpace.profile.probes import Room, make_batch

HOST = Room("host", pages=9000, page_tokens=32, max_rows=64, max_tokens=512, max_model_len=8192)
NO_SEATS = Room("gpu", pages=0, page_tokens=32, max_rows=64, max_tokens=512, max_model_len=8192)
GPU = Room("gpu", pages=100, page_tokens=32, max_rows=64, max_tokens=512, max_model_len=8192)


def gpu_part(rows: float) -> float:
    return 2.0**-7 + 2.0**-12 * rows


class CpuEngine:
    """The GPU's part takes 2**-7 s and 2**-12 s a row more; on the CPU a row takes 2**-11 s, and a
    token of context 2**-20 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.routes: set[str] = set()

    def clock(self) -> float:
        return self.now

    def launch(self, batch: Batch) -> Future[StepResult]:
        self.routes.add(batch.route)
        halves = 2 if batch.route == "assist2" else 1
        rows = len(batch.rows) / halves
        host = 2.0**-11 * rows + 2.0**-20 * sum(row.end for row in batch.rows) / halves
        self.now += gpu_part(rows) + host if halves == 1 else 2 * max(gpu_part(rows), host)
        ticket: Future[StepResult] = Future()
        ticket.set_result(StepResult([0] * len(batch.rows)))
        return ticket

    def copy(self, job: CopyJob) -> Future[None]:
        raise AssertionError("a probe copies nothing")

    def close(self) -> None:
        pass


class GpuEngine(CpuEngine):
    """Steps end when the test says so."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(steps)

    def launch(self, batch: Batch) -> Future[StepResult]:
        ticket: Future[StepResult] = Future()
        if self.allowed.acquire(timeout=0.01):
            self.now += 1.0
            ticket.set_result(StepResult([0] * len(batch.rows)))
        else:
            ticket.set_exception(RuntimeError("no more steps"))
        return ticket


def test_dense_work_and_attention_come_apart_and_every_route_can_be_judged() -> None:
    cpu = CpuEngine()
    points = list(probe_assists(GpuEngine(0), cpu, NO_SEATS, HOST, gpu_part, 1e9, cpu.clock))
    assert cpu.routes == {"assist", "assist2"}
    costs = TableCostModel(points)
    assert runnable(costs, ("assist", "assist2")) == ("assist", "assist2")
    for rows in (8, 32, 64):
        assert costs.assist(rows, 0.0).seconds == pytest.approx(gpu_part(rows))
        assert costs.assist_stolen(rows, 0, 1.0).seconds == 0.0
        # What is measured for no context attends to a token a row.
        assert costs.cpu_attention(rows, 32_768).seconds == pytest.approx(
            2.0**-11 * rows + 2.0**-20 * 32_768, abs=2.0**-20 * rows
        )
    for context in (32_768, 131_072):
        assert costs.cpu_attention(64, context).seconds == pytest.approx(
            2.0**-11 * 64 + 2.0**-20 * context, abs=2.0**-20 * 64
        )


@pytest.mark.parametrize("operation", ["assisted", "assisted2"])
def test_the_parts_predict_whole_iterations_by_either_route(operation: Whole) -> None:
    cpu = CpuEngine()
    costs = TableCostModel(
        probe_assists(GpuEngine(0), cpu, NO_SEATS, HOST, gpu_part, 1e9, cpu.clock)
    )
    points = [(rows, rows * 300) for rows in range(8, 64, 2)]
    cpu.routes.clear()
    measured = list(
        probe_assisted(GpuEngine(0), cpu, NO_SEATS, HOST, operation, points, 1e9, cpu.clock)
    )
    assert cpu.routes == {WHOLES[operation]}
    assert len(measured) == len(points)
    [found] = accuracy(costs, measured)
    assert found.operation == operation
    assert found.p90 < 0.01


@pytest.mark.parametrize("every", [3, 5, 8])
def test_an_iteration_that_is_held_up_once_in_a_while_leaves_no_mark(every: int) -> None:
    class HeldUp(CpuEngine):
        launched = 0

        def launch(self, batch: Batch) -> Future[StepResult]:
            self.launched += 1
            if self.launched % every == 0:
                self.now += 0.05
            return super().launch(batch)

    quiet, disturbed = (
        list(probe_assists(GpuEngine(0), cpu, NO_SEATS, HOST, gpu_part, 1e9, cpu.clock))
        for cpu in (CpuEngine(), HeldUp())
    )
    assert len(quiet) == len(disturbed) > 20
    for expected, found in zip(quiet, disturbed, strict=True):
        assert found.operation == expected.operation
        assert found.seconds == pytest.approx(expected.seconds)


def test_attention_takes_as_long_as_it_does_beside_the_steps_of_the_gpu() -> None:
    class BusyGpu(CpuEngine):
        running = 0

        def launch(self, batch: Batch) -> Future[StepResult]:
            self.running += 1
            time.sleep(1e-3)
            cpu.now += 2.0**-30
            ticket: Future[StepResult] = Future()
            ticket.set_result(StepResult([0] * len(batch.rows)))
            return ticket

    class SharedHost(CpuEngine):
        """Whose attention takes twice as long while the GPU engine launches steps."""

        def launch(self, batch: Batch) -> Future[StepResult]:
            before = gpu.running
            time.sleep(0.01)
            ticket = super().launch(batch)
            if gpu.running > before:
                self.now += 2.0**-20 * sum(row.end for row in batch.rows)
            return ticket

    cpu, gpu = SharedHost(), BusyGpu()
    points = list(probe_assists(gpu, cpu, GPU, HOST, gpu_part, 0.0, cpu.clock))
    costs = TableCostModel(points)
    assert costs.cpu_attention(64, 131_072).seconds == pytest.approx(
        2.0**-11 * 64 + 2 * 2.0**-20 * 131_072, rel=0.01
    )


def test_what_assists_take_is_told_apart_by_whether_decodes_or_prompts_are_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes take a quarter longer meanwhile, prompts twice as long, or four times beside those of
    long contexts."""
    monkeypatch.setattr(assist_probe, "QUIET_S", 0.02)
    now, end, ended = 0.0, -1.0, threading.Event()  # of the iteration under way
    long = False  # its context

    class SlowedGpu(CpuEngine):
        def launch(self, batch: Batch) -> Future[StepResult]:
            nonlocal now
            prompts = 4.0 if long else 2.0
            seconds, slowed = (0.02, prompts) if len(batch.rows) == 1 else (0.01, 1.25)
            now += seconds * (slowed if now < end else 1.0)
            if now >= end:
                ended.set()
            time.sleep(1e-4)
            ticket: Future[StepResult] = Future()
            ticket.set_result(StepResult([0] * len(batch.rows)))
            return ticket

    class Cpu(CpuEngine):
        """Of iterations that take a second; with nothing beside, time passes in them alone."""

        def launch(self, batch: Batch) -> Future[StepResult]:
            nonlocal now, end, long
            long = sum(row.end for row in batch.rows) > 1000
            end = now + 1.0
            ended.clear()
            before = now
            while not ended.wait(0.05):
                if now == before:
                    now = end
                    break
                before = now
            return super().launch(batch)

    def clock() -> float:
        return now

    costs = TableCostModel(probe_assists(SlowedGpu(), Cpu(), GPU, HOST, gpu_part, 1e9, clock))
    for slots in (1, 2):
        assert costs.assist_stolen(64, 0, 0.0, slots).seconds == pytest.approx(0.2, rel=0.1)
        assert costs.assist_stolen(64, 0, 1.0, slots).seconds == pytest.approx(0.5, rel=0.1)
        assert costs.assist_stolen(64, 0, 0.5, slots).seconds == pytest.approx(0.35, rel=0.1)
        assert costs.assist_stolen(64, HOST.longest(64), 0.0, slots).seconds == pytest.approx(
            0.2, rel=0.1
        )
        for rows in (2, 64):  # two rows cannot have that many tokens
            taken = costs.assist_stolen(rows, HOST.longest(64), 1.0, slots)
            assert taken.seconds == pytest.approx(0.75, rel=0.1)


def test_in_a_hurry_what_every_route_needs_is_measured_all_the_same() -> None:
    cpu = CpuEngine()
    points = list(probe_assists(GpuEngine(0), cpu, NO_SEATS, HOST, gpu_part, 0.0, cpu.clock))
    assert runnable(TableCostModel(points), ("assist",)) == ("assist",)
    assert {point.size for point in points} == {2, 64}
    assert not [point for point in points if point.operation == "assist_beside_prefill"]


def test_in_a_hurry_long_contexts_do_not_seem_to_be_read_from_caches() -> None:
    class Cached(CpuEngine):
        """Of whose contexts the first 2,048 tokens cost nothing."""

        def launch(self, batch: Batch) -> Future[StepResult]:
            ticket = super().launch(batch)
            self.now -= 2.0**-20 * min(2048, sum(row.end for row in batch.rows))
            return ticket

    cpu = Cached()
    costs = TableCostModel(
        probe_assists(GpuEngine(0), cpu, NO_SEATS, HOST, gpu_part, 0.0, cpu.clock)
    )
    for rows, context in ((4, 16_384), (32, 131_072), (48, 262_144)):
        expected = 2.0**-11 * rows + 2.0**-20 * (context - 2048)
        assert costs.cpu_attention(rows, context).seconds == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("pages", [65, 70, 128, 1000])
def test_few_rows_are_measured_with_a_long_context_however_few_the_pages(pages: int) -> None:
    cpu, small = CpuEngine(), dataclasses.replace(HOST, pages=pages)
    points = list(probe_assists(GpuEngine(0), cpu, NO_SEATS, small, gpu_part, 0.0, cpu.clock))
    longest = max(p.context for p in points if p.operation == "cpu_attention" and p.size == 2)
    assert longest >= small.longest(2) / 2


@pytest.mark.parametrize("steps", [5, 20, 40, 80, 160])
def test_nothing_counts_that_was_measured_after_the_steps_beside_had_failed(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assist_probe, "QUIET_S", 1e-3)

    class Slow(CpuEngine):
        def launch(self, batch: Batch) -> Future[StepResult]:
            time.sleep(5e-4)
            if gpu.failed:
                after.append(len(batch.rows))
            return super().launch(batch)

    class Failing(GpuEngine):
        failed = False

        def launch(self, batch: Batch) -> Future[StepResult]:
            ticket = super().launch(batch)
            self.failed = self.failed or ticket.exception() is not None
            time.sleep(1e-4)
            return ticket

    after: list[int] = []
    cpu, gpu = Slow(), Failing(steps)
    points = []
    with pytest.raises(RuntimeError, match="no more steps"):
        points += probe_assists(gpu, cpu, GPU, HOST, gpu_part, 1e9, cpu.clock)
    assert not {point.size for point in points} & set(after)


def test_a_host_with_fewer_pages_than_there_may_be_rows_is_measured_up_to_these() -> None:
    cpu, small = CpuEngine(), dataclasses.replace(HOST, pages=40)
    points = list(probe_assists(GpuEngine(0), cpu, NO_SEATS, small, gpu_part, 0.0, cpu.clock))
    assert runnable(TableCostModel(points), ("assist", "assist2")) == ("assist", "assist2")
    assert {point.size for point in points} == {2, 40}


@pytest.mark.parametrize("consequence", [None, ValueError("no assist came")])
def test_a_step_that_fails_beside_is_not_passed_over(consequence: Exception | None) -> None:
    gpu = GpuEngine(DEPTH + 3)
    batch = make_batch("gpu_decode", 4, 64, GPU)
    assert batch is not None
    steps = Beside(gpu, batch, gpu.clock)

    def until_it_fails() -> None:
        with steps:
            while steps.error is None:
                time.sleep(1e-3)
            if consequence is not None:
                raise consequence

    with pytest.raises(RuntimeError, match="no more steps"):
        until_it_fails()
    assert len(steps.times) == DEPTH + 3


def test_steps_that_are_interrupted_before_the_first_has_ended_do_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctrl_c = threading.Event()

    class Held(GpuEngine):
        def launch(self, batch: Batch) -> Future[StepResult]:
            ctrl_c.wait()
            return super().launch(batch)

    def sleep(_: float) -> None:
        ctrl_c.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(beside, "time", SimpleNamespace(sleep=sleep))
    gpu = Held(10**9)
    batch = make_batch("gpu_decode", 4, 64, GPU)
    assert batch is not None
    steps = Beside(gpu, batch, gpu.clock)
    with pytest.raises(KeyboardInterrupt), steps:
        raise AssertionError("entered all the same")
    assert not steps.running
    assert steps.error is None
