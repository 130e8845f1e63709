"""A CPU iteration's dense work in graphs: right values, whatever the other side does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dualpace.assist.mailbox import Mailbox, create_mailbox, mailbox_layout, open_mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Batch, BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.assist_service import SlotTensors
from dualpace.gpu.executor import TorchExecutor
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SECONDS = float(os.environ.get("DUALPACE_SOAK_SECONDS", 60))


class CpuSide:
    """Plays the CPU engine for tokens at position 0, which attend to themselves alone."""

    def __init__(self, mailbox: Mailbox, spec: ModelSpec) -> None:
        self.mailbox = mailbox
        self.spec = spec
        self.at = [SlotTensors.of(mailbox, spec, slot) for slot in range(2)]
        self.iterations = 0

    def start(self, slot: int, tokens: list[int]) -> None:
        at = self.at[slot]
        at.tokens[: len(tokens)] = torch.tensor(tokens)
        at.positions[: len(tokens)] = 0
        at.temperatures[: len(tokens)] = 0.0
        at.qkv.fill_(float("nan"))
        at.sampled.fill_(-1)
        self.iterations += 1
        self.mailbox.submit(slot, self.iterations, len(tokens), b"")

    def attend(self, slot: int, layer: int, rows: int) -> None:
        assert self.mailbox.wait_done(slot, layer) == "ready"
        at, spec = self.at[slot], self.spec
        values = at.qkv[:rows, spec.num_heads + spec.num_kv_heads :]
        at.attended[:rows] = values.repeat_interleave(spec.group_size, dim=1)
        self.mailbox.post_go(slot, layer)

    def tokens(self, slot: int, rows: int) -> list[int]:
        assert self.mailbox.wait_done(slot, self.spec.num_layers) == "ready"
        return [int(token) for token in self.at[slot].sampled[:rows]]


@pytest.fixture
def assisting(wide: Any, wide_config: EngineConfig) -> Iterator[tuple[TorchExecutor, CpuSide]]:
    spec = load_spec(wide[0])
    layout = mailbox_layout(spec, "bfloat16", 24, 512)
    descriptor = create_mailbox(layout)
    config = msgspec.structs.replace(wide_config, cpu_routes=("assist",))
    executor = TorchExecutor(
        config, spec, iter_weights(wide[0], spec, "bfloat16"), arena=None, wake=lambda: None,
        mailbox=open_mailbox(descriptor, layout, "gpu"),
    )  # fmt: skip
    mailbox = open_mailbox(descriptor, layout, "cpu", patience=5.0)
    os.close(descriptor)
    side = CpuSide(mailbox, spec)
    yield executor, side
    executor.close()
    side.at.clear()
    mailbox.close()


@pytest.fixture
def cpu_side(assisting: tuple[TorchExecutor, CpuSide]) -> CpuSide:
    return assisting[1]


@pytest.fixture
def clear(wide: Any) -> dict[int, int]:
    """What the model says after each token alone, for those after which its choice is clear."""
    with torch.inference_mode():
        logits = wide[1](torch.arange(640).cuda()[:, None]).logits[:, -1]
    first, second = logits.topk(2).values.unbind(-1)
    return {
        token: int(logits[token].argmax())
        for token in range(640)
        if first[token] - second[token] > 0.05
    }


@pytest.mark.parametrize("rows", [1, 7, 8, 24])
def test_an_iteration_comes_out_as_the_model_says(
    cpu_side: CpuSide, clear: dict[int, int], rows: int
) -> None:
    for again in range(3):
        tokens = [int(t) for t in np.random.default_rng(rows + again).choice(list(clear), rows)]
        assert cpu_side.mailbox.begin() == "ready"
        cpu_side.start(0, tokens)
        cpu_side.mailbox.ring()
        for layer in range(cpu_side.spec.num_layers):
            cpu_side.attend(0, layer, rows)
        assert cpu_side.tokens(0, rows) == [clear[token] for token in tokens]


def test_two_slots_take_turns(cpu_side: CpuSide, clear: dict[int, int]) -> None:
    first, second = list(clear)[:12], list(clear)[-9:]
    assert cpu_side.mailbox.begin() == "ready"
    cpu_side.start(0, first)
    cpu_side.start(1, second)
    cpu_side.mailbox.ring()
    for layer in range(cpu_side.spec.num_layers):
        cpu_side.attend(0, layer, len(first))
        cpu_side.attend(1, layer, len(second))
    assert cpu_side.tokens(1, len(second)) == [clear[token] for token in second]
    assert cpu_side.tokens(0, len(first)) == [clear[token] for token in first]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_iteration_that_is_given_up_frees_the_slot(
    cpu_side: CpuSide, clear: dict[int, int], layer: int
) -> None:
    tokens = list(clear)[:2]
    assert cpu_side.mailbox.begin() == "ready"
    cpu_side.start(0, [5, 6, 7])
    cpu_side.mailbox.ring()
    for earlier in range(layer):
        cpu_side.attend(0, earlier, 3)
    cpu_side.mailbox.cancel(0)
    assert cpu_side.mailbox.begin() == "ready"
    cpu_side.start(0, tokens)
    cpu_side.mailbox.ring()
    for each in range(cpu_side.spec.num_layers):
        cpu_side.attend(0, each, 2)
    assert cpu_side.tokens(0, 2) == [clear[token] for token in tokens]


def test_steps_of_all_kinds_and_both_slots_at_once_disturb_nobody(
    assisting: tuple[TorchExecutor, CpuSide], clear: dict[int, int]
) -> None:
    """Decode graphs, prompts through the layers' graphs and larger ones, and two assisted
    micro-batches, each over and over for a minute, on streams and in memory of their own."""
    executor, side = assisting
    rng = np.random.default_rng(1)

    def row(name: str, count: int, start: int, pages: list[int], seed: int) -> BatchRow:
        tokens = [int(t) for t in np.random.default_rng(seed).integers(0, 640, count)]
        return BatchRow(name, tokens, start, pages, "gpu", True, DecodeParams(temperature=0.0))

    prompts = tuple(row(f"r{i}", 60, 0, [2 * i, 2 * i + 1], i) for i in range(20))
    decodes = tuple(row(f"r{i}", 1, 60, [2 * i, 2 * i + 1], 50 + i) for i in range(20))
    batches = [
        Batch(1, prompts),  # more tokens than the layers' graphs take
        Batch(2, decodes),
        Batch(3, (*decodes[:5], *prompts[10:])),
    ]
    quiet = [executor.launch(batch).result() for batch in batches]
    ended = time.monotonic() + SECONDS
    with ThreadPoolExecutor(max_workers=1) as pool:

        def steps() -> int:
            count = 0
            while time.monotonic() < ended:
                tickets = [executor.launch(batch) for batch in batches]
                assert [ticket.result() for ticket in tickets] == quiet
                count += 1
            return count

        running = pool.submit(steps)
        iterations = 0
        while not running.done():
            sizes = rng.integers(1, 25, 2)
            asked = [[int(t) for t in rng.choice(list(clear), size)] for size in sizes]
            assert side.mailbox.begin() == "ready"
            for slot, tokens in enumerate(asked):
                side.start(slot, tokens)
            side.mailbox.ring()
            for layer in range(side.spec.num_layers):
                for slot, tokens in enumerate(asked):
                    side.attend(slot, layer, len(tokens))
            for slot, tokens in enumerate(asked):
                assert side.tokens(slot, len(tokens)) == [clear[token] for token in tokens]
            iterations += 1
        assert min(running.result(), iterations) > 10
