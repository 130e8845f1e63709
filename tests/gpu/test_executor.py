"""Steps and copies of the GPU engine's executors, against transformers' generate."""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dualpace.core.config import EngineConfig
from dualpace.core.errors import EngineError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Batch, BatchRow, CopyJob, Tier
from dualpace.core.sampling import DecodeParams
from dualpace.core.timeline import Timeline
from dualpace.cpu.standin import StandInExecutor
from dualpace.gpu.executor import TorchExecutor
from dualpace.gpu.memory import largest_batch
from dualpace.models.registry import ModelSource
from dualpace.models.weights import iter_weights

GREEDY = DecodeParams(temperature=0.0)
Generate = Callable[[list[int], int], list[int]]
Executor = TorchExecutor | StandInExecutor


class Sequence:
    """A request driven by hand: chunks of its prompt, then one token a step."""

    def __init__(self, name: str, prompt: list[int], pages: list[int], tier: Tier) -> None:
        self.name = name
        self.prompt = prompt
        self.tokens = list(prompt)
        self.pages = pages
        self.tier: Tier = tier
        self.done = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def row(self, chunk: int) -> BatchRow:
        part = self.tokens[self.done : self.done + chunk]
        self.done += len(part)
        return BatchRow(
            request_id=self.name,
            tokens=part,
            start=self.done - len(part),
            pages=self.pages,
            tier=self.tier,
            sample=self.done == len(self.tokens),
            params=GREEDY,
        )


def step(executor: Executor, sequences: list[Sequence], chunk: int) -> None:
    rows = tuple(sequence.row(chunk) for sequence in sequences)
    outcome = executor.launch(Batch(number=1, rows=rows)).result(timeout=60).tokens
    for sequence, row, token in zip(sequences, rows, outcome, strict=True):
        assert (token is not None) == row.sample
        if token is not None:
            sequence.tokens.append(token)


def prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 150, length)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill_beside_decodes_in_both_tiers_equals_generate(
    chunk: int, executor: Executor, greedy: Generate
) -> None:
    short = [
        Sequence("a", prompt(3, 1), [5, 2], "gpu"),
        Sequence("b", prompt(17, 2), [9, 0], "host"),
    ]
    while any(not sequence.output for sequence in short):
        step(executor, [sequence for sequence in short if not sequence.output], 64)
    # Page tables out of order, and longer than the context needs.
    long = [
        Sequence("c", prompt(45, 3), [7, 1, 11, 0], "gpu"),
        Sequence("d", prompt(50, 4), [15, 3, 4, 12, 1], "host"),
    ]
    while any(len(sequence.output) < 6 for sequence in short + long):
        step(executor, [s for s in short + long if len(s.output) < 6], chunk)
    for sequence in short + long:
        assert sequence.output == greedy(sequence.prompt, 6), sequence.name


def test_logprobs_come_for_the_rows_that_asked_and_sampled(
    executor: TorchExecutor, checkpoint: tuple[ModelSource, Any]
) -> None:
    asked = DecodeParams(temperature=1.0, seed=3, logprobs=4)
    prompts = [prompt(9, 7), prompt(5, 8), prompt(20, 9), prompt(3, 10)]
    rows = [
        Sequence(str(i), ids, [2 * i, 2 * i + 1], "gpu").row(16) for i, ids in enumerate(prompts)
    ]
    rows[1:] = [msgspec.structs.replace(row, params=asked) for row in rows[1:]]
    result = executor.launch(Batch(number=1, rows=tuple(rows))).result(timeout=60)
    # The third row's prompt is not complete yet, and the first did not ask.
    assert [token is None for token in result.tokens] == [False, False, True, False]
    assert sorted(result.logprobs) == [1, 3]
    for index, got in result.logprobs.items():
        logits = checkpoint[1](torch.tensor([prompts[index]])).logits[0, -1].detach()
        expected = logits.double().log_softmax(dim=-1)
        assert got.logprob == pytest.approx(float(expected[result.tokens[index]]), abs=1e-4)
        best = expected.topk(4)
        assert got.top_ids == best.indices.tolist()
        assert got.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_sequence_goes_on_after_moving_between_the_tiers(
    executor: Executor, greedy: Generate, arena: bytearray, config: EngineConfig
) -> None:
    sequence = Sequence("a", prompt(40, 5), [3, 8, 1], "host")
    step(executor, [sequence], 64)
    step(executor, [sequence], 1)
    for kind, pages in (("load", [6, 0, 2]), ("store", [14, 5, 9])):
        move = CopyJob(number=1, request_id="a", kind=kind, source=sequence.pages, target=pages)
        before = sequence.pages
        assert executor.copy(move).result(timeout=60) is None
        sequence.pages = pages
        sequence.tier = "gpu" if kind == "load" else "host"
        if kind == "load":
            step(executor, [sequence], 1)
    # A full page has come back from the GPU as the same bytes that were taken there.
    host = np.frombuffer(arena, dtype=np.uint8).reshape(-1, config.page_bytes)
    np.testing.assert_array_equal(host[14], host[3])
    assert before == [6, 0, 2]
    step(executor, [sequence], 1)
    assert sequence.output == greedy(sequence.prompt, 4)


def test_many_decode_rows_in_one_step_do_not_mix(executor: Executor, greedy: Generate) -> None:
    sequences = [Sequence(str(i), prompt(3 + 2 * i, i), [i], "gpu") for i in range(6)]
    sequences += [Sequence(f"h{i}", prompt(1 + i, i), [i], "host") for i in range(3)]
    for _ in range(3):
        step(executor, sequences, 64)
    for sequence in sequences:
        assert sequence.output == greedy(sequence.prompt, 3)


def test_banned_ids_are_not_sampled(executor: Executor, greedy: Generate) -> None:
    ids = prompt(5, 6)
    first = greedy(ids, 1)
    row = msgspec.structs.replace(Sequence("a", ids, [0], "gpu").row(8), banned_ids=(first[0], 149))
    (token,) = executor.launch(Batch(number=1, rows=(row,))).result(timeout=60).tokens
    assert token not in (first[0], 149)


@pytest.mark.parametrize(
    ("pages", "tier"), [([12], "gpu"), ([-1], "gpu"), ([16], "host"), ([], "gpu")]
)
def test_a_failing_step_fails_its_own_ticket_only(
    pages: list[int], tier: Tier, executor: Executor, greedy: Generate
) -> None:
    bad = executor.launch(Batch(number=1, rows=(Sequence("bad", [1, 2], pages, tier).row(2),)))
    good = executor.launch(Batch(number=2, rows=(Sequence("good", [1, 2], [0], "gpu").row(2),)))
    with pytest.raises(EngineError):
        bad.result(timeout=60)
    assert good.result(timeout=60).tokens == greedy([1, 2], 1)


@pytest.mark.parametrize(("source", "target"), [([16], [0]), ([0], [12]), ([0, 1], [2])])
def test_a_failing_copy_fails_its_own_ticket_only(
    source: list[int], target: list[int], executor: Executor
) -> None:
    with pytest.raises(EngineError):
        executor.copy(
            CopyJob(number=1, request_id="a", kind="load", source=source, target=target)
        ).result(timeout=60)
    executor.copy(CopyJob(number=2, request_id="a", kind="store", source=[0], target=[0])).result(
        timeout=60
    )


def test_every_finished_ticket_wakes_and_close_frees_the_arena(
    checkpoint: tuple[ModelSource, Any], spec: ModelSpec, config: EngineConfig
) -> None:
    wakes = threading.Semaphore(0)
    arena = mmap.mmap(-1, config.host_pages * config.page_bytes)
    weights = iter_weights(checkpoint[0], spec, "float32")
    executor = TorchExecutor(config, spec, weights, arena=arena, wake=wakes.release)
    assert executor.gpu_pages == config.gpu_pages
    tickets = [
        executor.launch(Batch(number=1, rows=())),
        executor.launch(Batch(number=2, rows=(Sequence("a", [1], [0], "gpu").row(1),))),
        executor.copy(CopyJob(number=1, request_id="a", kind="store", source=[0], target=[1])),
    ]
    for _ in tickets:
        assert wakes.acquire(timeout=60)
    assert [ticket.done() for ticket in tickets] == [True] * 3
    assert tickets[0].result().tokens == []
    executor.close()
    arena.close()
    with pytest.raises(EngineError, match="closed"):
        executor.launch(Batch(number=3, rows=()))


def test_an_arena_that_is_too_small_is_refused(
    checkpoint: tuple[ModelSource, Any], spec: ModelSpec, config: EngineConfig
) -> None:
    weights = iter_weights(checkpoint[0], spec, "float32")
    with pytest.raises(EngineError, match="arena"):
        TorchExecutor(config, spec, weights, arena=bytearray(10), wake=lambda: None)


def test_the_trial_batch_runs_on_one_page(
    checkpoint: tuple[ModelSource, Any], spec: ModelSpec, config: EngineConfig
) -> None:
    one_page = msgspec.structs.replace(config, gpu_pages=1, dtype="bfloat16", host_pages=0)
    weights = iter_weights(checkpoint[0], spec, "bfloat16")
    executor = TorchExecutor(one_page, spec, weights, arena=None, wake=lambda: None)
    batch = largest_batch(config)
    assert batch.num_tokens == config.max_num_batched_tokens
    assert len(batch.rows) == config.max_num_seqs
    assert max(row.end for row in batch.rows) == config.max_model_len
    assert None not in executor.launch(batch).result(timeout=60).tokens
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_pool_takes_what_memory_is_left_on_a_gpu(
    checkpoint: tuple[ModelSource, Any], spec: ModelSpec, config: EngineConfig
) -> None:
    config = msgspec.structs.replace(
        config, device="cuda", gpu_pages=None, gpu_memory_utilization=0.5, host_pages=0
    )
    weights = iter_weights(checkpoint[0], spec, "float32")
    executor = TorchExecutor(config, spec, weights, arena=None, wake=lambda: None)
    _, total = torch.cuda.mem_get_info()
    assert 0.3 * total < executor.gpu_pages * config.page_bytes < 0.5 * total
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_timeline_tells_when_the_device_ran_each_step(
    checkpoint: tuple[ModelSource, Any], spec: ModelSpec, config: EngineConfig, tmp_path: Path
) -> None:
    weights = iter_weights(checkpoint[0], spec, "float32")
    timeline = Timeline("gpu")
    begin = time.monotonic()
    executor = TorchExecutor(
        msgspec.structs.replace(config, device="cuda"), spec, weights,
        arena=None, wake=lambda: None, timeline=timeline,
    )  # fmt: skip
    for number in range(1, 4):
        row = Sequence("a", prompt(20, number), [0, 1], "gpu").row(20)
        executor.launch(Batch(number=number, rows=(row,))).result(timeout=60)
    executor.close()
    timeline.write(tmp_path)
    spans = json.loads((tmp_path / "gpu.json").read_text())["traceEvents"]
    lanes = {
        lane: [(span["ts"], span["ts"] + span["dur"]) for span in spans if span["tid"] == lane]
        for lane in ("launch", "device")
    }
    assert len(lanes["device"]) == len(lanes["launch"]) == 3
    slack = 1e3  # microseconds: two clocks
    for (start, end), (launch, _) in zip(lanes["device"], lanes["launch"], strict=True):
        assert launch - slack <= start < end <= time.monotonic() * 1e6 + slack
    assert begin * 1e6 <= lanes["device"][0][0]
    assert lanes["device"][0][1] <= lanes["device"][1][0] + slack
