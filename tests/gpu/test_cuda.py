"""The fast paths of a CUDA device in bfloat16, against transformers, torch and each other."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dualpace.core.config import EngineConfig
from dualpace.core.history import TokenHistory
from dualpace.core.plan import PENDING, Batch, BatchRow, CopyJob, StepResult
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.executor import TorchExecutor
from dualpace.gpu.flashinfer_model import FlashInferModel
from dualpace.gpu.runner import ModelRunner
from dualpace.gpu.sampler import SampleRow, sample
from dualpace.gpu.step_input import flatten
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PAGE_TOKENS = 32


@pytest.fixture(scope="module")
def runner(wide: Any, wide_config: EngineConfig) -> Iterator[ModelRunner]:
    source = wide[0]
    spec = load_spec(source)
    with torch.inference_mode():
        yield ModelRunner(
            wide_config, spec, iter_weights(source, spec, "bfloat16"), None, lambda: None
        )


def prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 640, length)]


def row(
    name: str, tokens: list[int], start: int, pages: list[int], sample: bool = True, **params: Any
) -> BatchRow:
    settings = DecodeParams(**{"temperature": 0.0, **params})
    return BatchRow(name, tokens, start, pages, "gpu", sample, settings)


def pages_of(index: int) -> list[int]:
    """Four pages of the pool, out of order, for request `index`."""
    return [4 * index + 2, 4 * index, 4 * index + 3, 4 * index + 1]


def logits_of(runner: ModelRunner, rows: list[BatchRow]) -> torch.Tensor:
    """Eager logits, in the order of the rows, which are one kind."""
    step = flatten(Batch(1, tuple(rows)), PAGE_TOKENS, {})
    return runner._model.forward(step, runner._sampled).float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_logits_are_as_near_to_float32_as_transformers_own_bfloat16(
    runner: ModelRunner, wide: Any
) -> None:
    reference = wide[1]
    prompts = [prompt(length, length) for length in (1, 31, 32, 33, 100, 127)]
    narrow = type(reference).from_pretrained(wide[0].path, dtype=torch.bfloat16).cuda()
    with torch.inference_mode():
        exact = torch.stack(
            [reference(torch.tensor([ids]).cuda()).logits[0, -1] for ids in prompts]
        )
        rough = torch.stack([narrow(torch.tensor([ids]).cuda()).logits[0, -1] for ids in prompts])
    whole = logits_of(
        runner, [row(f"r{i}", ids, 0, pages_of(i)) for i, ids in enumerate(prompts[1:], 1)]
    )
    limit = 1.5 * distance(rough.float(), exact)
    assert distance(whole, exact[1:]) < limit
    # In chunks, beside decodes of one token.
    logits_of(runner, [row(f"r{i}", ids[:20], 0, pages_of(i)) for i, ids in enumerate(prompts)
                       if len(ids) > 20])  # fmt: skip
    rest = [
        row("r0", prompts[0], 0, pages_of(0)),
        *(row(f"r{i}", ids[20:], 20, pages_of(i)) for i, ids in enumerate(prompts[1:], 1)),
    ]
    assert distance(logits_of(runner, rest), exact) < limit


def fill(runner: ModelRunner, lengths: list[int]) -> list[BatchRow]:
    """Prefill prompts of these lengths; returns the next decode row of each."""
    prompts = [prompt(length, 50 + i) for i, length in enumerate(lengths)]
    runner.launch(
        Batch(1, tuple(row(f"r{i}", p, 0, pages_of(i), False) for i, p in enumerate(prompts)))
    ).result()
    return [row(f"r{i}", [7 + i], length, pages_of(i)) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("length", [2, 16, 17, 100, 250])
def test_graphed_layers_compute_what_eager_layers_compute(
    runner: ModelRunner, length: int, beside: int
) -> None:
    rows = fill(runner, [20 + i for i in range(beside)])
    rows.append(row("p", prompt(length, 9), 0, [*pages_of(10), *pages_of(11)]))
    assert isinstance(runner._model, FlashInferModel)
    graphs = runner._model.graphs
    assert graphs is not None
    assert graphs.takes(length + beside)
    graphed = logits_of(runner, rows)
    runner._model.graphs = None
    try:
        eager = logits_of(runner, rows)
    finally:
        runner._model.graphs = graphs
    assert distance(graphed, eager) < 5e-3


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 17, 24])
def test_graphs_compute_what_eager_steps_compute(runner: ModelRunner, rows: int) -> None:
    decodes = fill(runner, [1 + (37 * i) % 120 for i in range(rows)])
    eager = logits_of(runner, decodes)
    assert runner._graphs is not None
    step = flatten(Batch(2, tuple(decodes)), PAGE_TOKENS, {})
    assert runner._graphs.takes(step)
    runner._sampled.fill_(-1)
    graphed = runner._graphs.run(step).float()
    assert distance(graphed, eager) < 5e-3
    assert torch.equal(runner._sampled[:rows], graphed.argmax(-1))


def test_the_drawing_kernel_draws_what_the_sampler_draws() -> None:
    from dualpace.gpu.triton_kernels import draw

    generator = torch.Generator("cuda").manual_seed(0)
    rows, vocab = 64, 128_256
    logits = torch.randn(rows, vocab, device="cuda", generator=generator).bfloat16() * 4
    logits[3, 9] = float("nan")
    logits[5] = 1.0  # all equal: the lowest id wins
    params = [
        DecodeParams(temperature=[0.0, 0.3, 1.0, 2.5][i % 4], seed=2**64 - 1 - i * 2**57)
        for i in range(rows)
    ]
    positions = [i * 1733 for i in range(rows)]
    rules = (
        torch.tensor([p.temperature for p in params], dtype=torch.float64, device="cuda"),
        torch.from_numpy(np.array([p.seed for p in params], np.uint64).view(np.int64)).cuda(),
        torch.tensor(positions, device="cuda"),
    )
    drawn, placed = (torch.full((rows + 9,), -1, device="cuda") for _ in range(2))
    draw(logits, *rules, drawn)
    places = torch.randperm(rows + 9, device="cuda", generator=generator)[:rows]
    draw(logits, *rules, placed, places=places)
    by_sampler = sample(logits.float(), list(map(SampleRow, params, positions)))
    assert torch.equal(drawn[:rows], by_sampler.tokens)
    assert torch.equal(placed[places], by_sampler.tokens)
    assert (drawn[rows:] == -1).all()
    assert (placed == -1).sum() == 9


def test_steps_launched_ahead_of_a_slow_device_compute_what_an_unhurried_one_computes(
    runner: ModelRunner,
) -> None:
    """Ten steps are launched while the first still waits: their tables, tokens and plans must not
    overwrite each other's."""
    lengths = [5, 40, 77, 100]

    def decode(ahead: bool) -> list[StepResult]:
        decodes = fill(runner, lengths)
        launched = []
        outcomes: list[StepResult] = []
        if ahead:
            torch.cuda._sleep(2_000_000_000)
        for step in range(10):
            # A short prompt joins every third step, which is then not a graph's.
            extra = [row("x", prompt(9, step), 0, pages_of(20), False)] if step % 3 == 2 else []
            launched.append(runner.launch(Batch(2 + step, (*decodes, *extra))))
            if not ahead:
                outcomes.append(launched[-1].result())
            decodes = [
                msgspec.structs.replace(
                    part,
                    tokens=[PENDING] if ahead else [outcomes[-1].tokens[i]],  # type: ignore[list-item]
                    start=part.start + 1,
                    params=DecodeParams(temperature=0.7, seed=i, logprobs=2 if i == 1 else None),
                )
                for i, part in enumerate(decodes)
            ]
        return [step.result() for step in launched]

    assert decode(ahead=True) == decode(ahead=False)


def test_rows_with_special_rules_keep_them_in_a_graph(runner: ModelRunner) -> None:
    decodes = fill(runner, [30, 60, 90])
    free = runner.launch(Batch(2, tuple(decodes))).result().tokens
    banned = tuple(
        msgspec.structs.replace(part, banned_ids=(int(token),)) if i != 1 else part
        for i, (part, token) in enumerate(zip(decodes, free, strict=True))
        if token is not None
    )
    held = runner.launch(Batch(3, banned)).result().tokens
    assert held[1] == free[1]
    assert held[0] != free[0]
    assert held[2] != free[2]


def test_a_penalty_counts_the_token_that_only_the_device_knows(runner: ModelRunner) -> None:
    decodes = fill(runner, [30, 60])
    first = runner.launch(Batch(2, tuple(decodes))).result().tokens
    rules = DecodeParams(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=3.0)

    def second(known: bool) -> StepResult:
        runner.launch(Batch(2, tuple(decodes)))
        parts = []
        for part, token in zip(decodes, first, strict=True):
            assert token is not None
            history = TokenHistory().counts(part.tokens, [5, token] if known else [5])
            parts.append(
                msgspec.structs.replace(
                    part,
                    tokens=[token] if known else [PENDING],
                    start=part.start + 1,
                    params=rules,
                    history=history,
                )
            )
        return runner.launch(Batch(3, tuple(parts))).result()

    assert second(known=False) == second(known=True)


def test_out_of_memory_frees_the_step_and_the_next_one_runs(
    wide: Any, wide_config: EngineConfig, make_ballast: Callable[[], list[torch.Tensor]]
) -> None:
    from dualpace.core.errors import StepTooLargeError

    source = wide[0]
    spec = load_spec(source)
    executor = TorchExecutor(
        wide_config, spec, iter_weights(source, spec, "bfloat16"), arena=None, wake=lambda: None
    )
    long = Batch(1, tuple(row(f"r{i}", prompt(100, i), 0, pages_of(i)) for i in range(20)))
    expected = executor.launch(long).result()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ballast = make_ballast()
    held = torch.cuda.memory_allocated()
    with pytest.raises(StepTooLargeError):
        executor.launch(long).result()
    assert torch.cuda.memory_allocated() == held
    del ballast
    assert executor.launch(long).result() == expected
    executor.close()


@pytest.fixture
def make_ballast() -> Callable[[], list[torch.Tensor]]:
    """Takes nearly all memory that is free."""

    def make() -> list[torch.Tensor]:
        free, _ = torch.cuda.mem_get_info()
        parts = []
        size = free
        while size >= 2**18:
            try:
                parts.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        return parts

    return make


class Served:
    """An executor with a host arena, and one request driven by hand."""

    def __init__(self, wide: Any, config: EngineConfig, host_pages: int = 64) -> None:
        source = wide[0]
        self.spec = load_spec(source)
        self.config = msgspec.structs.replace(config, host_pages=host_pages, policy="dualpace")
        self.arena = mmap.mmap(-1, host_pages * config.page_bytes)
        self.arena.write(b"\xff" * len(self.arena))  # NaN, wherever nothing was written
        self.executor = TorchExecutor(
            self.config, self.spec, iter_weights(source, self.spec, "bfloat16"),
            arena=self.arena, wake=lambda: None,
        )  # fmt: skip

    def run(self, *rows: BatchRow) -> list[int | None]:
        return self.executor.launch(Batch(1, rows)).result().tokens

    def copy(self, kind: Any, source: list[int], target: list[int], request: str = "h") -> None:
        self.executor.copy(CopyJob(1, request, kind, source, target)).result()

    def page(self, index: int) -> torch.Tensor:
        size = self.config.page_bytes
        data = np.frombuffer(self.arena, np.uint8, size, index * size).view(np.int16)
        pages = torch.from_numpy(data.copy()).view(torch.bfloat16).float()
        return pages.view(-1, PAGE_TOKENS, self.spec.head_dim)


def host(part: BatchRow, pages: list[int]) -> BatchRow:
    return msgspec.structs.replace(part, request_id="h", tier="host", pages=pages)


@pytest.mark.parametrize("budget", [2048, 64])
def test_a_prompt_for_the_host_is_computed_as_one_with_a_seat_and_lands_whole(
    wide: Any, wide_config: EngineConfig, budget: int
) -> None:
    """With the small budget its first chunks leave the GPU before the last one is computed, and
    come back from the host a layer at a time: as near as bfloat16 is, not the same bit by bit."""
    served = Served(wide, msgspec.structs.replace(wide_config, max_num_batched_tokens=budget))
    length, chunk = 300, 64
    ids = prompt(length, 3)
    seat = [*pages_of(3), *pages_of(4), *pages_of(5)]
    room = [9, 8, 7, 30, 31, 32, 33, 50, 3, 1, 63]
    tokens: dict[str, list[int | None]] = {"seat": [], "host": []}
    others = prompt(64, 8)
    for start in range(0, length, chunk):
        part = row("s", ids[start : start + chunk], start, seat, start + chunk >= length)
        tokens["seat"] += served.run(part)
        tokens["host"] += served.run(host(part, room))
        served.copy("land", [], [])
        # Somebody else's prompt passes between two chunks.
        served.run(msgspec.structs.replace(host(row("o", others, 0, [], False), [20, 21]),
                                           request_id=f"o{start}"))  # fmt: skip
        served.copy("land", [], [], f"o{start}")
    # The seat's pages, stored beside it, are the same up to rounding in another batch.
    count = -(-length // PAGE_TOKENS)
    beside = list(range(40, 40 + count))
    beside[7] = 55
    served.copy("store", seat[:count], beside)
    for index in range(count):
        used = min(PAGE_TOKENS, length - index * PAGE_TOKENS)
        landed, stored = served.page(room[index]), served.page(beside[index])
        assert distance(landed[..., :used, :], stored[..., :used, :]) < 2e-2
    # Back to the GPU, it decodes there as the one with the seat does.
    target = list(range(100, 100 + count))
    served.copy("load", room[:count], target)
    first = [token for token in tokens["seat"] if token is not None]
    landed_next = served.run(row("h", first, length, target))
    if budget == 2048:
        assert tokens["host"] == tokens["seat"]
        assert landed_next == served.run(row("s", first, length, seat))
    served.executor.close()


def test_copies_go_beside_the_steps_and_bring_every_byte(
    wide: Any, wide_config: EngineConfig
) -> None:
    served = Served(wide, wide_config)
    generator = np.random.default_rng(0)
    content = generator.integers(0, 255, 10 * wide_config.page_bytes, dtype=np.uint8)
    served.arena.seek(0)
    served.arena.write(content.tobytes())
    scattered = [5, 6, 7, 2, 0, 1, 9, 8, 3, 4]
    served.copy("load", scattered, list(range(10)))
    served.copy("store", list(range(10)), [p + 20 for p in scattered])
    size = wide_config.page_bytes
    back = np.frombuffer(served.arena, np.uint8, 10 * size, 20 * size)
    assert np.array_equal(back, content)
    del back
    served.executor.close()
