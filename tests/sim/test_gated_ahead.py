"""Steps of gated scheduling that are planned while the last one runs, and which must not be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from dualpace.core.messages import AnyMessage, PeerDrained
from dualpace.core.plan import PENDING, Batch, CopyJob, CopyKind
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.policy.cost_model import Point, TableCostModel
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.view import GpuDecision, GpuView
from dualpace.sim.executor import next_token
from dualpace.sim.world import Hardware, World

PAGE_TOKENS = 4
STEP = 0.01  # seconds
# The dense layers cover the attention to some 2,000 tokens.
COSTS = TableCostModel(
    Point(operation, size, context, fixed + per_token * context)
    for operation, fixed, per_token in (
        ("gpu_decode", 0.01, 1e-6),
        ("gpu_prefill", 0.01, 1e-6),
        ("cpu_attention", 1e-4, 5e-6),
    )
    for size in (1, 64)
    for context in (0, 1000)
)


def request(arrival: int, prompt: int, output: int, stop_ids: tuple[int, ...] = ()) -> RequestState:
    tokens = [1000 * arrival + i for i in range(prompt)]
    params = DecodeParams(max_tokens=output, stop_ids=stop_ids)
    return RequestState(f"r{arrival}", arrival, 0, tokens, [], params)


def expected(state: RequestState) -> list[int]:
    tokens = list(state.prompt)
    for _ in range(state.params.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in state.params.stop_ids:
            break
    return tokens[len(state.prompt) :]


@dataclass
class Launch:
    """A step, and those that were under way when it was launched."""

    batch: Batch
    beside: list[Batch]

    @property
    def gated(self) -> bool:
        return any(row.gated for row in self.batch.rows)

    @property
    def requests(self) -> list[str]:
        return [row.request_id for row in self.batch.rows]


@dataclass
class Run:
    """What a world under gated scheduling has launched."""

    world: World
    steps: list[Launch] = field(default_factory=list)
    copies: list[tuple[CopyJob, list[Batch]]] = field(default_factory=list)  # with steps under way
    drained: list[float] = field(default_factory=list)  # times of `PeerDrained`

    @property
    def under_way(self) -> list[Batch]:
        return [batch for batch, ticket in self.world.gpu.loop.steps if not ticket.done()]

    def first_steps(self) -> dict[str, int]:
        """In which each request took part."""
        return {name: step.batch.number for step in reversed(self.steps) for name in step.requests}

    def copied(self, kind: CopyKind) -> list[str]:
        """Whose pages, in order."""
        return [job.request_id for job, _ in self.copies if job.kind == kind]

    def outputs(self) -> list[list[int]]:
        return [stream.received for stream in self.world.streams.values()]


def serve(
    states: list[RequestState],
    gpu_pages: int,
    host_pages: int = 0,
    *,
    depth: int = 2,
    attended: bool = False,
    whole_prompts: bool = False,
    max_tokens: int = 400,
    submitted: Callable[[RequestState], float] = lambda state: 0.0,
    launch: float = 0.0,
    crash: float | None = None,
    policy: type[GatedPolicy] = GatedPolicy,
    world: type[World] = World,
) -> Run:
    """Serve `states` to their ends; every step takes 10 ms. launch: seconds that the policy counts
    for one of the CPU engine; 1.0 keeps the gate shut."""

    def gpu_step(batch: Batch) -> float:
        run.steps.append(Launch(batch, run.under_way))
        return STEP

    def copy(job: CopyJob) -> float:
        run.copies.append((job, run.under_way))
        return STEP / 2

    def fate(sender: str, to: str, body: AnyMessage) -> tuple[float, ...]:
        if isinstance(body, PeerDrained):
            run.drained.append(run.world.clock.now)
        return (0.0,)

    hardware = Hardware(
        gpu_pages=gpu_pages,
        host_pages=host_pages,
        gpu_step=gpu_step,
        cpu_step=lambda batch: STEP,
        copy=copy,
        delay=lambda sender, to: 1e-4,
        page_tokens=PAGE_TOKENS,
        restart=2 * STEP,
        fate=fate,
    )
    run = Run(
        world(
            hardware, policy(COSTS, layers=1, launch=launch), max_rows=32, max_tokens=max_tokens,
            gpu_depth=depth, attended=attended, whole_prompts=whole_prompts,
        )
    )  # fmt: skip
    for state in states:
        run.world.submit(submitted(state), state)
    if crash is not None:
        run.world.crash_cpu(crash)
    run.world.run()
    assert run.outputs() == [expected(state) for state in states]
    run.world.check_integrity()
    return run


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_without_gated_rows_is_launched_while_another_one_runs(depth: int) -> None:
    """Decodes, the next chunk of a prompt and prompts that have just come; none for nothing where
    the length says when to end."""
    states = [request(0, 50, 9), request(1, 30, 12), request(2, 7, 9)]
    run = serve(states, 60, depth=depth, max_tokens=20, attended=True)
    besides = [[batch.number for batch in step.beside] for step in run.steps]
    behind = [[step.batch.number - 1] if depth == 2 else [] for step in run.steps]
    assert besides == [[], *behind[1:]]
    chunks = [row.start for step in run.steps for row in step.batch.rows if row.request_id == "r0"]
    assert chunks[:3] == [0, 20, 40]
    sampled = [row for step in run.steps for row in step.batch.rows if row.sample]
    assert len(sampled) == sum(len(output) for output in run.outputs())


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_long_prompt_comes_in_chunks_as_the_server_takes_it_or_whole_as_neo_does(
    whole_prompts: bool,
) -> None:
    states = [request(0, 50, 3), request(1, 7, 3)]
    run = serve(states, 60, max_tokens=20, whole_prompts=whole_prompts)
    counts = [
        len(row.tokens)
        for step in run.steps
        for row in step.batch.rows
        if row.request_id == "r0" and row.start < 50
    ]
    assert counts == ([50] if whole_prompts else [20, 20, 10])


def test_what_is_launched_behind_a_stop_token_is_dropped() -> None:
    stop = expected(request(0, 6, 5))[-1]
    run = serve([request(0, 6, 20, (stop,)), request(1, 6, 20)], 60)
    assert len(run.outputs()[0]) == 5
    assert sum("r0" in step.requests for step in run.steps) == 6


@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_under_way_beside_a_gated_step(seed: int, attended: bool) -> None:
    rng = random.Random(seed)
    states = [request(i, rng.randint(1, 30), rng.randint(1, 40)) for i in range(40)]
    run = serve(
        states, 30, 200, attended=attended, max_tokens=rng.choice([40, 400]),
        submitted=lambda state: state.arrival * STEP,
    )  # fmt: skip
    gated = [step for step in run.steps if step.gated]
    assert gated
    assert not any(step.beside for step in gated)
    assert not any(row.tokens == [PENDING] for step in gated for row in step.batch.rows)
    behind_gated = [
        step for step in run.steps for batch in step.beside if any(row.gated for row in batch.rows)
    ]
    assert not behind_gated
    assert any(step.beside for step in run.steps)


class Restless(GatedPolicy):
    """Swaps each row out at every third token, and in again after the next one."""

    def plan_gpu(self, view: GpuView) -> GpuDecision:
        return msgspec.structs.replace(
            super().plan_gpu(view),
            demote=tuple(row.id for row in view.decoding if row.tokens % 3 == 0),
            gate=(tuple(row.id for row in view.host if row.tokens % 3 == 0), ()),
            promote=tuple(row.id for row in view.host if row.tokens % 3 == 1),
        )


def test_no_row_changes_its_tier_while_a_step_computes_for_it() -> None:
    states = [request(i, 5, 20) for i in range(4)]
    run = serve(states, 60, 60, policy=Restless)
    assert len(run.copied("store")) > 20
    assert any(step.beside for step in run.steps)
    for job, under_way in run.copies:
        assert job.request_id not in [row.request_id for batch in under_way for row in batch.rows]


def test_a_cpu_engine_comes_back_while_steps_follow_each_other_without_a_pause() -> None:
    """Once those that were launched before it died have ended: no moment is without one."""
    crash = 10.5 * STEP
    run = serve([request(0, 4, 100)], 60, 60, attended=True, crash=crash)
    assert all(step.beside for step in run.steps[1:])
    assert [crash + STEP < time < crash + 3 * STEP for time in run.drained] == [True]


def test_a_prompt_without_room_yet_is_not_passed_by_a_later_one() -> None:
    """The first of three has the pages until its last token is there; of the others only the
    smaller one would find some before."""
    states = [request(0, 16, 4), request(1, 20, 4), request(2, 4, 4)]
    first = serve(states, 10).first_steps()
    assert first["r0"] < first["r1"] <= first["r2"]


def test_a_host_row_without_room_yet_is_not_passed_by_a_later_one() -> None:
    """As above, where both have been computed into the host meanwhile."""
    states = [request(0, 36, 4), request(1, 24, 9), request(2, 4, 9)]
    run = serve(states, 12, 60, launch=1.0)
    assert run.copied("load") == ["r1", "r2"]


def test_a_prompt_that_comes_with_the_last_step_of_a_row_gets_its_place_on_the_gpu() -> None:
    """It is planned for when that step is under way, and the pages are as good as free."""
    states = [request(0, 16, 4), request(1, 20, 4)]
    run = serve(states, 7, 60, submitted=lambda state: 2.5 * STEP * state.arrival)
    assert len(run.steps) == 8
    assert {row.tier for step in run.steps for row in step.batch.rows} == {"gpu"}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_step_makes_of_a_prompt_whose_beginning_is_lost_does_not_count(
    depth: int, first_copy_fails: Callable[[CopyKind], type[World]]
) -> None:
    """The second chunk, which samples, is under way when the first one fails to land; what comes
    next is planned at once, without its token."""
    states = [request(0, 16, 2), request(1, 26, 6)]
    world = first_copy_fails("land")
    run = serve(states, 9, 60, depth=depth, max_tokens=20, attended=True, world=world)
    assert run.world.gpu_scheduler.moves["preempted"] == 1
    parts = [row for step in run.steps for row in step.batch.rows if row.request_id == "r1"]
    assert [(row.tier, row.start) for row in parts[:4]] == [
        ("host", 0), ("host", 16), ("gpu", 0), ("gpu", 20),
    ]  # fmt: skip


def test_no_decode_sits_out_for_pages_that_a_row_gives_back_with_the_step_under_way() -> None:
    """r1 needs one more in just the step behind the last one of r0."""
    states = [request(0, 16, 4), request(1, 17, 9), request(2, 4, 5)]
    run = serve(states, 12)
    assert [step.requests for step in run.steps[:4]] == [["r0", "r1", "r2"]] * 4
    assert [step.requests for step in run.steps[4:6]] == [["r1", "r2"], ["r1"]]
    assert [bool(step.beside) for step in run.steps[:6]] == [False, True, True, True, False, True]
