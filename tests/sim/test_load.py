"""What the CPU engine is told of the GPU's prompts."""

from __future__ import annotations

import pytest

from dualpace.core.plan import Batch
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.cost_model import Point, TableCostModel
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.host import HostRules
from dualpace.scheduler.load import SECONDS, StepLoad
from dualpace.sim.world import Hardware, World

DECODES, PROMPTS = 0.05, 0.4  # seconds of a step without prompts, and of one with some


def test_steps_weigh_by_their_time_and_not_by_their_number() -> None:
    """Of 0.25 s, a step with prompts takes 0.2 and has them for three quarters of it."""
    load = StepLoad()
    now, values = 0.0, []
    for number in range(0, 400, 2):
        load.look(now)
        load.launched(number, 0.75, 0.2)
        now += 0.2
        load.ended(number)
        load.look(now)
        load.launched(number + 1, 0.0, 0.05)
        now += 0.05
        load.ended(number + 1)
        values.append(load.prefill_share)
    assert values[-1] == pytest.approx(0.75 * 0.2 / 0.25, abs=0.05)
    assert max(values) - min(values[len(values) // 2 :]) < 0.1
    load.look(now)
    load.look(now + SECONDS)
    assert load.prefill_share == pytest.approx(values[-1] / 2.718, rel=0.1)


def steps(load: StepLoad, now: float, took: float, count: int, *, failed: bool = False) -> float:
    """Steps one after the other, of which 0.2 s are expected; the time at which they are over."""
    for number in range(count):
        load.look(now)
        load.launched(number, 0.75, 0.2)
        now += took
        (load.failed if failed else load.ended)(number)
    load.look(now)
    return now


def test_prompts_that_take_longer_than_predicted_are_known_to_for_as_long_as_they_do() -> None:
    load = StepLoad()
    assert load.overrun == 1.0
    now = steps(load, 0.0, 0.3, 20)
    assert load.overrun == pytest.approx(1.5)
    steps(load, now, 0.19, 60)
    assert load.overrun == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("every", "overrun"), [(4, 1.5), (8, 1.0)])
def test_prompts_are_paced_by_steps_that_are_long_if_not_seldom(every: int, overrun: float) -> None:
    load = StepLoad()
    now = 0.0
    for _ in range(8):
        now = steps(load, now, 0.2, every - 1)
        now = steps(load, now, 0.3, 1)
    assert load.overrun == pytest.approx(overrun)


@pytest.mark.parametrize("held_up", [2.0, 60.0])
def test_a_step_that_something_else_holds_up_does_not_slow_down_those_after_it(
    held_up: float,
) -> None:
    load = StepLoad()
    now = steps(load, 0.0, 0.2, 20)
    now = steps(load, now, held_up, 1)
    assert load.overrun < 1.2
    steps(load, now, 0.2, 10)
    assert load.overrun < 1.05


def test_a_step_that_failed_was_not_quick() -> None:
    load = StepLoad()
    now = steps(load, 0.0, 0.3, 20)
    steps(load, now, 0.002, 10, failed=True)
    assert load.overrun == pytest.approx(1.5)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_counts_for_as_long_as_it_runs_also_if_another_one_is_planned_meanwhile(
    depth: int,
) -> None:
    """A prompt now and then beside one row's decodes."""
    points = [Point("cpu_iteration", size, context, 1.0) for size in (1, 9) for context in (0, 99)]
    for size in (1, 1000):
        for context in (0, 9999):
            points.append(Point("gpu_decode", size, context, DECODES))
            points.append(Point("gpu_prefill", size, context, PROMPTS))
    spent = {True: 0.0, False: 0.0}  # seconds, by whether there were prompts

    def gpu_step(batch: Batch) -> float:
        prompts = batch.num_tokens > len(batch.rows)
        seconds = PROMPTS if prompts else DECODES
        spent[prompts] += seconds
        return seconds

    hardware = Hardware(
        gpu_pages=1000, host_pages=0, gpu_step=gpu_step, cpu_step=lambda batch: 1.0,
        copy=lambda job: 0.0, delay=lambda sender, to: 0.0,
    )  # fmt: skip
    policy = DualPacePolicy(8, HostRules(TableCostModel(points), 1.0))
    world = World(hardware, policy, gpu_depth=depth)
    for number in range(20):
        output = 1000 if number == 0 else 1
        params = DecodeParams(max_tokens=output)
        world.submit(number, RequestState(f"r{number}", number, 0, [1] * 64, [], params))
    world.run(20.0)
    share = (1.0 - DECODES / PROMPTS) * spent[True] / (spent[True] + spent[False])
    assert 0.2 < share < 0.5
    assert world.gpu_scheduler.load.prefill_share == pytest.approx(share, abs=0.08)
