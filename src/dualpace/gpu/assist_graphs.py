"""`AssistService` on CUDA: an iteration's dense work is one graph, driven by the mailbox's flags.

For each slot and bucket of rows a graph runs the whole iteration, embedding to drawn tokens. It is
launched once; from then on it and the CPU engine's threads take turns through words in memory that
both see, without Python, messages or launches on the way. Slots may run at once, beside each other
and beside the decode graphs: each has its own streams, memory pool and cuBLAS workspace.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.assist.mailbox import SLOTS, Doorbell, Mailbox
from dualpace.core.errors import EngineError
from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.assist_service import SlotTensors, special_rows
from dualpace.gpu.cuda_layers import CudaLayers, Flow, TokenInputs
from dualpace.gpu.decode_graphs import replay_seconds
from dualpace.gpu.gate import capturing, device_alone, end_waiting_work, start_waiting_work
from dualpace.gpu.sampler import sample
from dualpace.gpu.stream_flags import stream_waits_for, stream_writes

logger = logging.getLogger(__name__)

BUCKETS = (8, 16, 32, 64, 128, 256)
HIGH_PRIORITY = -1  # the CPU engine's threads wait for these streams


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, V]
    sampled: Tensor  # int64 [rows]


class SlotGraphs:
    """The graphs of one slot, whose memory is registered with CUDA."""

    def __init__(self, layers: CudaLayers, mailbox: Mailbox, slot: int) -> None:
        self._layers = layers
        self._layout = mailbox.layout
        self._slot = slot
        self._at = SlotTensors.of(mailbox, layers.spec, slot)
        # Where the layout's offsets count from.
        self._base = self._at.tokens.data_ptr() - mailbox.layout.area(slot, "tokens")[0]
        self.stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
        self._capture_stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
        self._pool = torch.cuda.graph_pool_handle()
        most, device = mailbox.layout.max_rows, layers.weights.device
        # Graphs of one slot never run at once: they share what they read and what they leave.
        self._nowhere = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._unknown = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._logits = torch.empty(
            (most, layers.spec.vocab_size), dtype=layers.weights.dtype, device=device
        )
        sizes = [size for size in BUCKETS if size < most] + [most]
        with capturing(f"capturing the assist graphs of slot {slot}"):
            self._graphs = {size: self._capture(size, flags=True) for size in sizes[::-1]}

    def launch(self, rows: int) -> tuple[_Graph, torch.cuda.Event]:
        """Start an iteration of `rows` rows; the event passes at its end."""
        graph = self._graphs[min(size for size in self._graphs if size >= rows)]
        ended = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.stream):
            graph.graph.replay()
            ended.record()
        return graph, ended

    def raise_flags(self) -> None:
        """Let a graph whose peer has given up run to its end, on whatever lies there."""
        for layer in range(self._layers.spec.num_layers):
            address = self._base + self._layout.go(self._slot, layer)
            ctypes.c_uint32.from_address(address).value = 1

    def seconds_without_turns(self, rows: int, *, copies: bool) -> float:
        """Seconds of the same work for a bucket of `rows`, when nobody is waited for.

        copies: between the slot's memory and the device's. No iteration may be under way.
        """
        with capturing("timing an assist's work"):
            graph = self._capture(rows, flags=False, copies=copies).graph
            return replay_seconds(graph)

    def _capture(self, rows: int, *, flags: bool, copies: bool = True) -> _Graph:
        from dualpace.gpu.triton_kernels import draw

        at, layers, layout = self._at, self._layers, self._layout
        device, lm_head = layers.weights.device, layers.weights.lm_head
        seeds = torch.from_numpy(at.seeds.view(np.int64))
        nowhere, unknown = self._nowhere[:rows], self._unknown[:rows]
        logits = self._logits[:rows]

        def body(*, flags: bool) -> Tensor:
            tokens, positions, temperatures, keys = (
                area[:rows].to(device, non_blocking=True)
                for area in (at.tokens, at.positions, at.temperatures, seeds)
            )
            flow = Flow.new(layers.spec, rows, device)
            # KV is the CPU engine's: nothing is appended here.
            inputs = TokenInputs(tokens.long(), unknown, positions, nowhere, nowhere)
            layers.enter(inputs, unknown, flow)
            for index in range(layers.spec.num_layers):
                if copies:
                    at.qkv[:rows].flatten(1).copy_(flow.qkv, non_blocking=True)
                if flags:
                    stream_writes(self._base + layout.done(self._slot, index), 1)
                    stream_waits_for(self._base + layout.go(self._slot, index), 1)
                if copies:
                    flow.attended.copy_(at.attended[:rows], non_blocking=True)
                hidden = layers.leave(index, inputs, flow)
            torch.mm(hidden, lm_head.t(), out=logits)
            sampled = torch.empty(rows, dtype=torch.int64, device=device)
            draw(logits, temperatures, keys, positions + 1, sampled)
            return sampled

        self._capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._capture_stream):
            body(flags=False)  # kernels are compiled and libraries set up outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            sampled = body(flags=flags)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._capture_stream)
        return _Graph(graph, logits, sampled)


class RegisteredMailbox:
    """The areas of a mailbox as memory that CUDA's streams reach, until it is closed."""

    def __init__(self, mailbox: Mailbox, spec: ModelSpec) -> None:
        """Raises `EngineError` where CUDA does not register it."""
        tokens = SlotTensors.of(mailbox, spec, 0).tokens
        base = tokens.data_ptr() - mailbox.layout.area(0, "tokens")[0]
        with device_alone("registering the mailbox"):
            error = int(torch.cuda.cudart().cudaHostRegister(base, mailbox.layout.device_bytes, 0))
        if error:
            raise EngineError(f"CUDA does not register the mailbox (error {error})")
        self.mailbox = mailbox
        self._undo = weakref.finalize(self, _unregister, base)

    def close(self) -> None:
        """No graph that uses it may run."""
        self._undo()


def _unregister(base: int) -> None:
    with device_alone("unregistering the mailbox"):
        torch.cuda.cudart().cudaHostUnregister(base)


class CudaAssistService:
    """`AssistService` by `SlotGraphs`. The doorbell's thread launches, another ends iterations."""

    def __init__(
        self, registered: RegisteredMailbox, layers: CudaLayers, slots: Sequence[SlotGraphs]
    ) -> None:
        """slots: of this mailbox and these layers, one for each of the mailbox's."""
        self._registered = registered
        self._mailbox = registered.mailbox
        self._layers = layers
        self._slots = list(slots)
        self._at = [SlotTensors.of(self._mailbox, layers.spec, slot) for slot in range(SLOTS)]
        self._enders = [
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"assist-{slot}")
            for slot in range(SLOTS)
        ]
        self._doorbell = Doorbell(self._mailbox, self._answer)

    def close(self) -> None:
        """Give up what is under way, and let go of threads and mailbox."""
        self._doorbell.close()
        self._mailbox.close()
        for ender in self._enders:
            ender.shutdown(wait=True)
        self._slots.clear()
        self._at.clear()
        self._registered.close()

    def _answer(self, slot: int, iteration: int, rows: int, rules_bytes: int) -> None:
        start_waiting_work()
        try:
            launched = self._slots[slot].launch(rows)
        except Exception:
            end_waiting_work()
            logger.exception("assisted iteration %d was not launched", iteration)
            self._mailbox.fail(slot)
            return
        self._enders[slot].submit(self._end, slot, iteration, rows, rules_bytes, *launched)

    def _end(
        self,
        slot: int,
        iteration: int,
        rows: int,
        rules_bytes: int,
        graph: _Graph,
        ended: torch.cuda.Event,
    ) -> None:
        outcome = self._mailbox.wait_go(slot, self._layers.spec.num_layers - 1)
        try:
            if outcome != "ready":
                self._slots[slot].raise_flags()
            ended.synchronize()
            if outcome == "ready":
                with torch.inference_mode(), torch.cuda.stream(self._slots[slot].stream):
                    self._draw(slot, rows, rules_bytes, graph)
        except Exception:
            logger.exception("assisted iteration %d failed", iteration)
            outcome = "cancelled"
        end_waiting_work()
        if outcome != "ready":
            logger.warning("assisted iteration %d given up: %s", iteration, outcome)
            self._mailbox.fail(slot)
            return
        self._mailbox.post_done(slot, self._layers.spec.num_layers)
        self._mailbox.finish(slot)

    def seconds_without_turns(self, rows: int, *, copies: bool) -> float:
        """As that of `SlotGraphs`, on the first slot."""
        return self._slots[0].seconds_without_turns(rows, copies=copies)

    def _draw(self, slot: int, rows: int, rules_bytes: int, graph: _Graph) -> None:
        """Tokens and logprobs to the mailbox; rows with special rules are drawn again."""
        at = self._at[slot]
        tokens = graph.sampled[:rows].cpu()
        special = special_rows(self._mailbox, at, slot, rules_bytes)
        if special:
            places = torch.tensor(list(special), device=graph.logits.device)
            drawn = sample(graph.logits[places].float(), list(special.values()))
            tokens[places.cpu()] = drawn.tokens.cpu()
            if drawn.logprobs is not None:
                at.logprobs[: drawn.logprobs.numel()] = drawn.logprobs.flatten().cpu()
        at.sampled[:rows] = tokens
