"""A CPU iteration's dense work in graphs: right values, whatever the other side does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dualpace.assist.mailbox import Mailbox, create_mailbox, mailbox_layout, open_mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.assist_service import SlotTensors
from dualpace.gpu.executor import TorchExecutor
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


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
def cpu_side(wide: Any, wide_config: EngineConfig) -> Iterator[CpuSide]:
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
    yield side
    executor.close()
    side.at.clear()
    mailbox.close()


def expected(wide: Any, tokens: list[int]) -> list[int]:
    """What the model says after each token alone, where its first choice is clear."""
    with torch.inference_mode():
        logits = wide[1](torch.tensor([[token] for token in tokens]).cuda()).logits[:, -1]
    top = logits.topk(2).values
    best = logits.argmax(-1)
    return [
        int(b) if gap > 0.05 else -1 for b, gap in zip(best, top[:, 0] - top[:, 1], strict=True)
    ]


def agree(tokens: list[int], right: list[int]) -> None:
    clear = [(t, r) for t, r in zip(tokens, right, strict=True) if r >= 0]
    assert clear, "no row of this test says anything"
    assert all(t == r for t, r in clear)


@pytest.mark.parametrize("rows", [1, 7, 8, 24])
def test_an_iteration_comes_out_as_the_model_says(cpu_side: CpuSide, wide: Any, rows: int) -> None:
    everything = list(range(640))
    clear = [
        t for t, right in zip(everything, expected(wide, everything), strict=True) if right >= 0
    ]
    for again in range(3):
        tokens = [int(t) for t in np.random.default_rng(rows + again).choice(clear, rows)]
        assert cpu_side.mailbox.begin() == "ready"
        cpu_side.start(0, tokens)
        cpu_side.mailbox.ring()
        for layer in range(cpu_side.spec.num_layers):
            cpu_side.attend(0, layer, rows)
        agree(cpu_side.tokens(0, rows), expected(wide, tokens))


def test_two_slots_take_turns(cpu_side: CpuSide, wide: Any) -> None:
    first, second = list(range(10, 22)), list(range(300, 309))
    assert cpu_side.mailbox.begin() == "ready"
    cpu_side.start(0, first)
    cpu_side.start(1, second)
    cpu_side.mailbox.ring()
    for layer in range(cpu_side.spec.num_layers):
        cpu_side.attend(0, layer, len(first))
        cpu_side.attend(1, layer, len(second))
    agree(cpu_side.tokens(1, len(second)), expected(wide, second))
    agree(cpu_side.tokens(0, len(first)), expected(wide, first))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_iteration_that_is_given_up_frees_the_slot(
    cpu_side: CpuSide, wide: Any, layer: int
) -> None:
    assert cpu_side.mailbox.begin() == "ready"
    cpu_side.start(0, [5, 6, 7])
    cpu_side.mailbox.ring()
    for earlier in range(layer):
        cpu_side.attend(0, earlier, 3)
    cpu_side.mailbox.cancel(0)
    assert cpu_side.mailbox.begin() == "ready"
    cpu_side.start(0, [8, 9])
    cpu_side.mailbox.ring()
    for each in range(cpu_side.spec.num_layers):
        cpu_side.attend(0, each, 2)
    agree(cpu_side.tokens(0, 2), expected(wide, [8, 9]))
