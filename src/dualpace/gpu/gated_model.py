"""Gated steps: two halves take turns layer by layer, the CPU engine attending for their host rows.

While it attends for one half, the GPU computes the dense layers of the other; GPU rows and host
rows of a half go through these together. This is the plain torch twin, which waits for the CPU
engine on the thread that launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.gated_turns import GatedTurns
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.torch_attention import TorchAttention
from dualpace.gpu.torch_model import upload_tokens
from dualpace.models.reference import Passage
from dualpace.models.torch_weights import Weights


class GatedOutcome(NamedTuple):
    """logits: of the sampled rows, [S, V], half after half; ended: to be called once the device has
    come to the step's end, raises `AssistError` if the CPU engine has not done its part."""

    logits: Tensor
    ended: Callable[[], None] | None


class GatedModel(Protocol):
    """The gated counterpart of `StepModel`. Not for two threads at once."""

    def forward(self, number: int, halves: Sequence[StepInput], previous: Tensor) -> GatedOutcome:
        """Run step `number` of one or two halves, at least one row of which is gated.

        previous: as for `StepModel.forward`. Raises `AssistError` if the CPU engine does not do its
        part: then nothing of the step counts.
        """
        ...

    def close(self) -> None:
        """Let go of the mailbox. No step is under way."""
        ...


class TorchGatedModel:
    """`GatedModel` by the reference forward pass on torch's CPU device."""

    def __init__(
        self, weights: Weights, spec: ModelSpec, pools: KVPools, turns: GatedTurns
    ) -> None:
        self._weights = weights
        self._spec = spec
        self._turns = turns
        self._attention = (
            TorchAttention(pools, spec.group_size, weights.device),
            TorchAttention(pools, spec.group_size, weights.device),
        )

    def forward(self, number: int, halves: Sequence[StepInput], previous: Tensor) -> GatedOutcome:
        gated = [half.num_gated for half in halves]
        parts = [
            self._enter(half, sum(map(bool, gated[:place])), self._attention[place], previous)
            for place, half in enumerate(halves)
        ]
        self._turns.begin(number, [rows for rows in gated if rows])
        try:
            for part in parts:
                part.post(0)
            for layer in range(self._spec.num_layers):
                for part in parts:
                    part.pass_through(layer)
        except BaseException:
            self._turns.give_up()
            raise
        self._turns.finish()
        hidden = torch.cat([part.sampled_hidden() for part in parts])
        logits = torch.nn.functional.linear(hidden, self._weights.lm_head)
        return GatedOutcome(logits, None)

    def close(self) -> None:
        self._turns.close()

    def _enter(
        self, half: StepInput, slot: int, attention: TorchAttention, previous: Tensor
    ) -> _Half:
        tokens = upload_tokens(half, previous, self._weights.device)
        attention.plan(half.spans[: len(half.rows) - half.num_gated])
        passage = Passage(self._weights, self._spec, tokens.ids, tokens.positions)
        return _Half(passage, attention, self._turns, slot, half.num_gated, tokens.sampled)


class _Half(NamedTuple):
    passage: Passage
    attention: TorchAttention
    turns: GatedTurns
    slot: int  # of the mailbox; of a half with gated rows
    gated: int  # rows, the last ones
    sampled: Tensor

    def post(self, layer: int) -> None:
        """Before the attention of `layer`."""
        if self.gated:
            qkv = torch.cat(self.passage.qkv, dim=1)
            self.turns.post(self.slot, layer, qkv[-self.gated :])

    def pass_through(self, layer: int) -> None:
        """The attention of `layer` and what follows up to the next one."""
        attended = self.attention.run(layer, *self.passage.qkv)
        if self.gated:
            attended[-self.gated :] = self.turns.attended(self.slot, layer, self.gated)
        self.passage.leave(layer, attended)
        if layer + 1 < self.turns.mailbox.layout.num_layers:
            self.post(layer + 1)

    def sampled_hidden(self) -> Tensor:
        return self.passage.normed()[self.sampled]
