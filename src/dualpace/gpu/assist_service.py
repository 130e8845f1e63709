"""The GPU engine's half of Dense Assist: everything between two attentions of a CPU iteration.

The protocol and its words are csrc/mailbox.h's. Knows no pages, requests or engine loop, beside
which it runs on threads of its own.
"""

from __future__ import annotations

import logging
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualpace.assist.mailbox import SLOTS, Doorbell, Mailbox
from dualpace.assist.rules import decode_rules
from dualpace.core.errors import AssistError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.sampler import SampleRow, sample
from dualpace.models import reference
from dualpace.models.torch_weights import Weights

logger = logging.getLogger(__name__)
TIMED_RUNS = 5


class AssistService(Protocol):
    """Serves the GPU's end of a mailbox from its birth on.

    Whatever it stands on, for each slot that the doorbell names it embeds the tokens, posts q, k, v
    of each layer (rotated) with its `done`, takes the attention's output at its `go`, posts the
    last `done` once sampled tokens and logprobs are there, and finishes the slot; or it fails the
    slot, which begins a new generation. It ends an iteration that the CPU has cancelled.
    """

    def seconds_without_turns(self, rows: int, *, copies: bool) -> float:
        """Seconds of the dense work of an iteration of `rows` rows when nobody is waited for.

        copies: between the slot's memory and the device's, where these are two. No iteration may be
        under way.
        """
        ...

    def close(self) -> None:
        """Give up what is under way, and let go of threads and mailbox."""
        ...


@dataclass(frozen=True)
class SlotTensors:
    """A slot's areas in the shared memory. R is the mailbox's largest number of rows."""

    tokens: Tensor  # int32 [R]
    positions: Tensor  # int64 [R]
    temperatures: Tensor  # float64 [R]
    seeds: npt.NDArray[np.uint64]  # [R]
    attended: Tensor  # [R, heads, D]
    qkv: Tensor  # [R, heads + 2·kv_heads, D]
    sampled: Tensor  # int32 [R]
    logprobs: Tensor  # float64, flat

    @classmethod
    def of(cls, mailbox: Mailbox, spec: ModelSpec, slot: int) -> SlotTensors:
        layout = mailbox.layout

        def activations(area: npt.NDArray[np.uint8], heads: int) -> Tensor:
            if layout.element_bytes == 4:
                flat = torch.from_numpy(area.view(np.float32))
            else:
                flat = torch.from_numpy(area.view(np.int16)).view(torch.bfloat16)
            return flat.view(layout.max_rows, heads, spec.head_dim)

        return cls(
            tokens=torch.from_numpy(mailbox.area(slot, "tokens").view(np.int32)),
            positions=torch.from_numpy(mailbox.area(slot, "positions").view(np.int64)),
            temperatures=torch.from_numpy(mailbox.area(slot, "temperatures").view(np.float64)),
            seeds=mailbox.area(slot, "seeds").view(np.uint64),
            attended=activations(mailbox.area(slot, "attended"), spec.num_heads),
            qkv=activations(mailbox.area(slot, "qkv"), spec.num_heads + 2 * spec.num_kv_heads),
            sampled=torch.from_numpy(mailbox.area(slot, "sampled").view(np.int32)),
            logprobs=torch.from_numpy(mailbox.area(slot, "logprobs").view(np.float64)),
        )


class TorchAssistService:
    """`AssistService` by the reference forward pass on torch's CPU device, a thread for each slot.

    threads: of torch, for each slot.
    """

    def __init__(self, mailbox: Mailbox, weights: Weights, spec: ModelSpec, threads: int) -> None:
        self._mailbox = mailbox
        self._weights = weights
        self._spec = spec
        self._slots = [SlotTensors.of(mailbox, spec, slot) for slot in range(SLOTS)]
        self._workers = [
            ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix=f"assist-{slot}",
                initializer=torch.set_num_threads,
                initargs=(threads,),
            )
            for slot in range(SLOTS)
        ]
        self._doorbell = Doorbell(mailbox, self._answer)

    def close(self) -> None:
        """Give up what is under way, and let go of threads and mailbox."""
        self._doorbell.close()
        self._mailbox.close()
        for worker in self._workers:
            worker.shutdown(wait=True)
        self._slots.clear()

    def seconds_without_turns(self, rows: int, *, copies: bool) -> float:
        nothing = torch.zeros(rows, dtype=torch.int64)
        times = []
        for _ in range(TIMED_RUNS):
            start = time.perf_counter()
            hidden = reference.forward(
                self._weights, self._spec, nothing, nothing, lambda layer, q, k, v: q
            )
            reference.logits(self._weights, hidden)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _answer(self, slot: int, iteration: int, rows: int, rules_bytes: int) -> None:
        self._workers[slot].submit(self._serve, slot, iteration, rows, rules_bytes)

    def _serve(self, slot: int, iteration: int, rows: int, rules_bytes: int) -> None:
        try:
            with torch.inference_mode():
                self._compute(slot, rows, rules_bytes)
        except AssistError as error:
            logger.warning("assisted iteration %d given up: %s", iteration, error)
            self._mailbox.fail(slot)
        except Exception:
            logger.exception("assisted iteration %d failed", iteration)
            self._mailbox.fail(slot)
        else:
            self._mailbox.finish(slot)

    def _compute(self, slot: int, rows: int, rules_bytes: int) -> None:
        at = self._slots[slot]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at.qkv[:rows] = torch.cat((q, k, v), dim=1)
            self._mailbox.post_done(slot, layer)
            outcome = self._mailbox.wait_go(slot, layer)
            if outcome != "ready":
                raise AssistError(f"layer {layer}: {outcome}")
            return at.attended[:rows]

        tokens, positions = at.tokens[:rows].long(), at.positions[:rows].clone()
        hidden = reference.forward(self._weights, self._spec, tokens, positions, attend)
        drawn = sample(
            reference.logits(self._weights, hidden), self._sample_rows(slot, rows, rules_bytes)
        )
        at.sampled[:rows] = drawn.tokens
        if drawn.logprobs is not None:
            at.logprobs[: drawn.logprobs.numel()] = drawn.logprobs.flatten()
        self._mailbox.post_done(slot, self._spec.num_layers)

    def _sample_rows(self, slot: int, rows: int, rules_bytes: int) -> list[SampleRow]:
        at = self._slots[slot]
        temperatures, seeds = at.temperatures[:rows].tolist(), at.seeds[:rows].tolist()
        positions = (at.positions[:rows] + 1).tolist()
        asked = [
            SampleRow(DecodeParams(temperature=temperature, seed=seed), position)
            for temperature, seed, position in zip(temperatures, seeds, positions, strict=True)
        ]
        for index, row in special_rows(self._mailbox, at, slot, rules_bytes).items():
            asked[index] = row
        return asked


def special_rows(
    mailbox: Mailbox, at: SlotTensors, slot: int, rules_bytes: int
) -> dict[int, SampleRow]:
    """The slot's rows that ask for more than temperature and noise, by index, in order."""
    encoded = mailbox.area(slot, "rules")[:rules_bytes].tobytes()
    return {
        rules.index: SampleRow(
            rules.params, int(at.positions[rules.index]) + 1, rules.banned_ids, rules.history
        )
        for rules in decode_rules(encoded)
    }
