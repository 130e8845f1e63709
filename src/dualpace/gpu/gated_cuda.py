"""`GatedModel` on CUDA: everything of a step is put on one stream, which the mailbox's flags drive.

The device waits for the CPU engine's `go` words and writes its `done` words by itself, between the
halves' layers. Should the CPU engine give up, a thread beside raises the flags, so that the stream
runs to its end on whatever lies there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.errors import AssistError
from dualpace.gpu.assist_graphs import RegisteredMailbox
from dualpace.gpu.cuda_layers import LayerPassage
from dualpace.gpu.flashinfer_model import FlashInferModel, StepAttention, enter
from dualpace.gpu.gate import end_waiting_work, start_waiting_work
from dualpace.gpu.gated_model import GatedOutcome
from dualpace.gpu.gated_turns import GatedTurns
from dualpace.gpu.layer_graphs import LayerGraphs
from dualpace.gpu.page_copies import PageCopies
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.stream_flags import stream_waits_for, stream_writes


class CudaGatedModel:
    """Both halves are under way at once: each has attention plans and graphs of its own."""

    def __init__(
        self,
        model: FlashInferModel,
        copies: PageCopies,
        graphs: LayerGraphs,
        registered: RegisteredMailbox,
    ) -> None:
        """model: whose attention and graphs are the first half's; graphs: the second half's."""
        spec = model.layers.spec
        self._layers = model.layers
        self._attention = (
            model.attention,
            StepAttention(spec, model.pools, model.workspace, copies),
        )
        self._graphs = (model.graphs, graphs)
        self._registered = registered
        self._turns = GatedTurns(registered.mailbox, spec)
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gated")

    def forward(self, number: int, halves: Sequence[StepInput], previous: Tensor) -> GatedOutcome:
        gated = [half.num_gated for half in halves]
        parts = [
            self._enter(place, half, sum(map(bool, gated[:place])), previous)
            for place, half in enumerate(halves)
        ]
        slots = range(sum(map(bool, gated)))
        self._turns.begin(number, [rows for rows in gated if rows])
        start_waiting_work()
        watched = self._watcher.submit(self._watch, slots)
        try:
            for part in parts:
                part.post(0)
            for layer in range(self._layers.spec.num_layers):
                for part in parts:
                    part.pass_through(layer)
            hidden = torch.cat([part.hidden[part.sampled] for part in parts])
            logits = functional.linear(hidden, self._layers.weights.lm_head)
        except BaseException:
            self._turns.give_up()  # which the watcher sees
            watched.result()
            raise
        return GatedOutcome(logits, partial(self._end, number, watched))

    def close(self) -> None:
        self._watcher.shutdown(wait=True)
        self._turns.close()
        self._registered.close()

    def _enter(self, place: int, half: StepInput, slot: int, previous: Tensor) -> _Half:
        attention = self._attention[place]
        arrays = attention.plan(half)
        passage = enter(self._layers, self._graphs[place], arrays, previous)
        attend = attention.begin(passage.flow)
        return _Half(passage, attend, self._turns, slot, half.num_gated, arrays["sampled"])

    def _watch(self, slots: Sequence[int]) -> str:
        """How the CPU engine's part has ended; from then on the device waits for nobody."""
        try:
            mailbox, last = self._turns.mailbox, self._layers.spec.num_layers - 1
            outcomes = [mailbox.wait_go(slot, last) for slot in slots]
            failures = [outcome for outcome in outcomes if outcome != "ready"]
            if not failures:
                return "ready"
            for slot in slots:
                for layer in range(last + 1):
                    address = self._turns.address + mailbox.layout.go(slot, layer)
                    ctypes.c_uint32.from_address(address).value = 1
            return failures[0]
        finally:
            end_waiting_work()

    def _end(self, number: int, watched: Future[str]) -> None:
        outcome = watched.result()
        if outcome == "ready":
            self._turns.finish()
            return
        self._turns.give_up()
        raise AssistError(f"step {number}: the CPU engine gave up its part: {outcome}")


@dataclass
class _Half:
    passage: LayerPassage
    attend: Callable[[int], None]  # of `StepAttention`
    turns: GatedTurns
    slot: int  # of the mailbox; of a half with gated rows
    gated: int  # rows, the last ones
    sampled: Tensor  # int64 [S], last token of each sampled row

    def __post_init__(self) -> None:
        self.hidden = self.passage.flow.residual  # until the last layer has been left

    def post(self, layer: int) -> None:
        """Before the attention of `layer`."""
        if not self.gated:
            return
        qkv = self.turns.slots[self.slot].qkv[: self.gated].flatten(1)
        qkv.copy_(self.passage.flow.qkv[-self.gated :], non_blocking=True)
        stream_writes(self.turns.address + self.turns.mailbox.layout.done(self.slot, layer), 1)

    def pass_through(self, layer: int) -> None:
        """The attention of `layer` and what follows up to the next one."""
        flow, layout = self.passage.flow, self.turns.mailbox.layout
        self.attend(layer)
        if self.gated:
            stream_waits_for(self.turns.address + layout.go(self.slot, layer), 1)
            attended = self.turns.slots[self.slot].attended[: self.gated]
            flow.attended[-self.gated :].copy_(attended, non_blocking=True)
        self.hidden = self.passage.leave(layer)
        if layer + 1 < layout.num_layers:
            self.post(layer + 1)
