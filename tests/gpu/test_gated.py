"""Gated steps of the GPU executor, the real CPU engine attending: as ordinary steps have it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dualpace.assist.mailbox import Mailbox, create_mailbox, mailbox_layout, open_mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.errors import AssistError
from dualpace.core.plan import Batch, BatchRow, CopyJob, StepResult
from dualpace.core.sampling import DecodeParams
from dualpace.cpu.model import CpuModel
from dualpace.gpu.executor import TorchExecutor
from dualpace.models.registry import ModelSource
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights

PAGE_TOKENS = 32
LENGTHS = (20, 31, 32, 65, 100, 90)  # of the prompts; the last three rows go to the host
TOLERANCE = 0.05  # of a logprob, in bfloat16


@dataclass
class Sides:
    """The GPU's executor and the CPU engine's model, over one arena and one mailbox."""

    executor: TorchExecutor
    model: CpuModel
    mailbox: Mailbox  # the CPU's end
    arena: mmap.mmap
    pool: ThreadPoolExecutor

    def attend(self, batch: Batch) -> Future[None]:
        """What the CPU engine does once it has been told of the step."""
        gated = [[row for row in half if row.gated] for half in batch.halves]
        halves = [half for half in gated if half]
        return self.pool.submit(self.model.attend, batch.number, halves, self.arena, PAGE_TOKENS)

    def run(self, batch: Batch) -> StepResult:
        ticket = self.executor.launch(batch)
        attending = self.attend(batch)
        result = ticket.result()
        attending.result()
        return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Heads as wide as FlashInfer's kernels want them."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=640, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
            num_attention_heads=8, num_key_value_heads=2, head_dim=128,
            max_position_embeddings=512, initializer_range=0.06,
        )
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    return ModelSource(Path(folder), "hf")


@pytest.fixture
def sides(source: ModelSource, device: str, config: EngineConfig) -> Iterator[Sides]:
    spec = load_spec(source)
    config = msgspec.structs.replace(
        config, dtype="bfloat16", device=device, policy="gated", max_model_len=512,
        max_num_seqs=24, max_num_batched_tokens=512, page_tokens=PAGE_TOKENS,
        page_bytes=spec.page_bytes(PAGE_TOKENS, 2), gpu_pages=40, host_pages=40,
        cpu_routes=("assist", "assist2"), host_weights=False,
    )  # fmt: skip
    layout = mailbox_layout(spec, "bfloat16", 24, 512)
    descriptor = create_mailbox(layout)
    mailbox = open_mailbox(descriptor, layout, "cpu")
    model = CpuModel(spec, None, dtype="bfloat16", cores=(0,), mailbox=mailbox)
    arena = mmap.mmap(-1, config.host_pages * config.page_bytes)
    executor = TorchExecutor(
        config, spec, iter_weights(source, spec, "bfloat16"), arena=arena, wake=lambda: None,
        mailbox=open_mailbox(descriptor, layout, "gpu"),
    )  # fmt: skip
    os.close(descriptor)
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield Sides(executor, model, mailbox, arena, pool)
        executor.close()


def pages_of(index: int) -> list[int]:
    """Four pages, out of order, for request `index`."""
    return [4 * index + 2, 4 * index, 4 * index + 3, 4 * index + 1]


def row(index: int, tokens: list[int], start: int, **fields: Any) -> BatchRow:
    params = DecodeParams(temperature=0.0, logprobs=0)
    given = {"tier": "gpu", "sample": True, "params": params, **fields}
    return BatchRow(f"r{index}", tokens, start, pages_of(index), **given)


@pytest.fixture
def decodes(sides: Sides) -> tuple[list[BatchRow], list[float]]:
    """Rows that decode, and the logprobs of their next tokens by an ordinary step. After that the
    KV of the last three, without that step's, is on the host."""
    rng = np.random.default_rng(1)
    prompts = [[int(i) for i in rng.integers(0, 640, length)] for length in LENGTHS]
    sides.executor.launch(
        Batch(1, tuple(row(i, each, 0, sample=False) for i, each in enumerate(prompts)))
    ).result()
    rows = [row(i, [7 + i], length) for i, length in enumerate(LENGTHS)]
    for number, index in enumerate((3, 4, 5)):
        pages = pages_of(index)
        job = CopyJob(number, f"r{index}", "store", pages, pages)
        sides.executor.copy(job).result()
    return rows, logprobs(sides.executor.launch(Batch(2, tuple(rows))).result())


def logprobs(result: StepResult) -> list[float]:
    return [result.logprobs[index].logprob for index in range(len(result.tokens))]


def gated(number: int, rows: list[BatchRow], order: list[int], second_half: int) -> Batch:
    """The rows in that order, the last three attended to by the CPU."""
    there = [
        each if index < 3 else msgspec.structs.replace(each, tier="host", gated=True)
        for index, each in enumerate(rows)
    ]
    return Batch(number, tuple(there[index] for index in order), second_half=second_half)


@pytest.mark.parametrize(
    ("order", "second_half"),
    [
        ([0, 1, 2, 3, 4, 5], 4),  # host rows in both halves
        ([0, 1, 2, 3, 4, 5], 3),  # in the second one
        ([2, 0, 1, 5, 3, 4], 6),  # in the only one
        ([4, 3, 5, 0, 1, 2], 2),  # in both, with those of the GPU in the second
    ],
)
def test_gated_rows_come_out_as_in_an_ordinary_step(
    sides: Sides,
    decodes: tuple[list[BatchRow], list[float]],
    order: list[int],
    second_half: int,
) -> None:
    rows, wanted = decodes
    for number in (3, 4):  # again: the first has left nothing behind
        result = sides.run(gated(number, rows, order, second_half))
        assert logprobs(result) == pytest.approx([wanted[i] for i in order], abs=TOLERANCE)


def test_prompts_of_either_tier_take_part_in_a_gated_step(
    sides: Sides, decodes: tuple[list[BatchRow], list[float]]
) -> None:
    rows, wanted = decodes
    prompt = [int(i) for i in np.random.default_rng(9).integers(0, 640, 70)]
    alone = logprobs(sides.executor.launch(Batch(3, (row(6, prompt, 0),))).result())
    parts = list(gated(4, rows, [0, 1, 2, 3, 4, 5], 4).rows)
    parts[1:1] = [row(7, prompt, 0), row(8, prompt, 0, tier="host")]
    got = logprobs(sides.run(Batch(4, tuple(parts), second_half=6)))
    expected = [wanted[0], *alone, *alone, *wanted[1:]]
    assert got == pytest.approx(expected, abs=TOLERANCE)
    # The host's prompt is there once it has landed, for the CPU to go on with.
    sides.executor.copy(CopyJob(9, "r8", "land", [], [])).result()
    on_gpu = logprobs(sides.executor.launch(Batch(5, (row(6, [3], 70),))).result())
    on_host = row(8, [3], 70, tier="host", gated=True)
    batch = Batch(6, (row(7, [3], 70), on_host), second_half=1)
    assert logprobs(sides.run(batch)) == pytest.approx(on_gpu * 2, abs=TOLERANCE)


def test_a_step_that_the_cpu_engine_lets_down_fails_and_the_next_one_is_right(
    sides: Sides, decodes: tuple[list[BatchRow], list[float]]
) -> None:
    rows, wanted = decodes
    order = [0, 1, 2, 3, 4, 5]
    with pytest.raises(AssistError, match="does not take part"):
        sides.executor.launch(gated(3, rows, order, 4)).result()
    # It asks, and gives up after the first layer.
    ticket = sides.executor.launch(gated(4, rows, order, 4))
    assert sides.mailbox.begin() == "ready"
    for slot, count in enumerate((1, 2)):
        sides.mailbox.submit(slot, 4, count, b"")
    sides.mailbox.ring()
    assert sides.mailbox.wait_done(0, 0) == "ready"
    sides.mailbox.post_go(0, 0)
    for slot in range(2):
        sides.mailbox.cancel(slot)
    with pytest.raises(AssistError, match="gave up"):
        ticket.result()
    # It is late: what it asks for an earlier step it is refused.
    late = sides.attend(gated(4, rows, order, 4))
    ticket = sides.executor.launch(gated(5, rows, order, 4))
    with pytest.raises(AssistError, match="gave it up"):
        late.result()
    sides.attend(gated(5, rows, order, 4)).result()
    assert logprobs(ticket.result()) == pytest.approx(wanted, abs=TOLERANCE)
