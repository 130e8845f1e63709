"""Weights, pools and model of one GPU (or its stand-in), and steps launched on it.

For one thread; order, tickets and the thread itself are the executor's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from dualpace.assist.mailbox import SLOTS, Mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.errors import EngineError, HardwareError
from dualpace.core.logprobs import unpack_logprobs
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Batch, CopyJob, StepResult
from dualpace.gpu.assist_graphs import CudaAssistService, RegisteredMailbox, SlotGraphs
from dualpace.gpu.assist_service import AssistService, TorchAssistService
from dualpace.gpu.decode_graphs import DecodeGraphs
from dualpace.gpu.draw import PackedLogprobs, draw_plain, draw_special, previous_tokens
from dualpace.gpu.flashinfer_attention import flashinfer
from dualpace.gpu.flashinfer_model import FlashInferModel, fits
from dualpace.gpu.gate import device_alone
from dualpace.gpu.gated_cuda import CudaGatedModel
from dualpace.gpu.gated_model import GatedModel, TorchGatedModel
from dualpace.gpu.gated_turns import GatedTurns
from dualpace.gpu.kv_pools import KVPools, arena_pool, new_pool
from dualpace.gpu.layer_graphs import LayerGraphs
from dualpace.gpu.memory import largest_batch, measure_gpu_pages
from dualpace.gpu.page_copies import PageCopies
from dualpace.gpu.registration import PIECE_BYTES, Registration
from dualpace.gpu.step_input import StepInput, end_to_end, flatten
from dualpace.gpu.step_model import StepModel
from dualpace.gpu.torch_model import TorchModel
from dualpace.gpu.transit import Placement, Transit
from dualpace.gpu.upload import fetch
from dualpace.models.tensors import Weight
from dualpace.models.torch_weights import load_weights

logger = logging.getLogger(__name__)

TRANSIT_STEPS = 4  # full steps of prompts for the host whose pages are kept on the GPU
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose tokens may still be on their way to the host."""

    step: StepInput
    tokens: Tensor  # int64 [R], on the host once `arrived` has passed
    logprobs: PackedLogprobs | None  # likewise
    arrived: torch.cuda.Event | None
    ended: Callable[[], None] | None = None  # raises `AssistError` if others have let it down
    begun: torch.cuda.Event | None = None  # when the device turned to it, where that is timed

    def result(self) -> StepResult:
        """Wait for what has been sampled; its rows are those of the batch."""
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.ended is not None:
            self.ended()
        tokens = self.tokens.tolist()
        outcome: list[int | None] = [None] * len(self.step.rows)
        for row in self.step.sampled_rows:
            outcome[self.step.order[row]] = tokens[row]
        if self.logprobs is None:
            return StepResult(outcome)
        asked = [(self.step.order[row], count) for row, count in self.logprobs.rows]
        return StepResult(outcome, unpack_logprobs(asked, self.logprobs.packed.tolist()))


class ModelRunner:
    """Launches steps in order and does copies. Used under `torch.inference_mode`.

    On CUDA in bfloat16 a step of decodes is one graph, any other step runs on FlashInfer, up to a
    size by a graph for each layer; elsewhere plain torch computes everything.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Iterable[tuple[str, Weight]],
        arena: Any | None,
        wake: Callable[[], None],
        mailbox: Mailbox | None = None,
        timed: bool = False,
    ) -> None:
        """timed: on CUDA, steps have events that tell when they ran. The other parameters are those
        of `TorchExecutor`."""
        self._spec = spec
        self._config = config
        self._device = torch.device(config.device)
        self._dtype = DTYPES[config.dtype]
        self._timed = timed and self._device.type == "cuda"
        self._fast = self._device.type == "cuda" and fits(spec, self._dtype)
        if self._fast:
            flashinfer()  # before the weights, should it be missing
            logger.info("FlashInfer compiles its kernels at the first start, within minutes")
        elif self._device.type == "cuda":
            logger.warning(
                "FlashInfer has no kernels for %s with head size %d: the GPU runs plain torch",
                config.dtype, spec.head_dim,
            )  # fmt: skip
        self._weights = load_weights(weights, spec, self._device, self._dtype)
        # Tokens by row of the step launched last, and whose rows they are.
        rows = config.max_num_seqs + config.max_num_batched_tokens
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._rows: dict[str, int] = {}
        self._graphs: DecodeGraphs | None = None
        self._assist: AssistService | None = None
        self._gated: GatedModel | None = None
        self._mailbox: RegisteredMailbox | None = None
        if mailbox is not None and self._device.type == "cuda":
            if not self._fast:
                instead = "--policy dualpace" if config.policy == "gated" else "--cpu-route local"
                raise HardwareError(
                    f"a GPU does not assist the CPU engine in {config.dtype} with head size "
                    f"{spec.head_dim}: {instead}"
                )
            self._mailbox = RegisteredMailbox(mailbox, spec)
        host_pages = config.host_pages if arena is not None else 0
        if host_pages:
            self._host = arena_pool(arena, spec, host_pages, config.page_tokens, self._dtype)
        else:
            self._host = new_pool(spec, 0, config.page_tokens, self._dtype, torch.device("cpu"))
        self._transit_pages = 0
        if host_pages and self._fast:
            self._transit_pages = (
                TRANSIT_STEPS * config.max_num_batched_tokens // config.page_tokens
            )
        self._piece = max(1, PIECE_BYTES // config.page_bytes)
        self._registration: Registration | None = None
        if host_pages and self._device.type == "cuda":
            self._registration = Registration(self._host, self._piece, wake)
        if config.gpu_pages is not None:
            self.gpu_pages = config.gpu_pages
        else:
            # The trial batch names nothing but page 0.
            self.gpu_pages = 1
            self._use_pools()
            trial = largest_batch(config)
            self.gpu_pages = measure_gpu_pages(
                config, self._device, lambda: self.launch(trial).result(), self._capture
            )
        self._use_pools()
        captured = self._capture()
        if captured is not None:
            self._graphs = captured.decode
        if self._mailbox is not None and isinstance(self._model, FlashInferModel):
            assert captured is not None
            # A kernel that is loaded later might wait for an assisted iteration to end.
            few = msgspec.structs.replace(config, max_num_seqs=2, max_num_batched_tokens=64)
            self.launch(largest_batch(few)).result()
            if captured.gated is not None and self._copies is not None:
                self._gated = CudaGatedModel(
                    self._model, self._copies, captured.gated, self._mailbox
                )
            else:
                self._assist = CudaAssistService(self._mailbox, self._model.layers, captured.assist)
        elif mailbox is not None and config.policy == "gated":
            turns = GatedTurns(mailbox, spec)
            self._gated = TorchGatedModel(self._weights, spec, self._pools, turns)
        elif mailbox is not None:
            self._assist = TorchAssistService(mailbox, self._weights, spec, config.gpu_threads)
        logger.info("KV pools: %d GPU pages, %d host pages", self.gpu_pages, host_pages)

    @property
    def usable_host_pages(self) -> int:
        """Pages of the host's pool, from 0 on, that can be copied by now."""
        return len(self._host) if self._registration is None else self._registration.pages

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step; its tokens are there when the device comes to its end.

        Raises `AssistError` for a gated one in which the CPU engine takes no part.
        """
        begun = torch.cuda.Event(enable_timing=True) if self._timed else None
        if begun is not None:
            begun.record()
        placement = Placement(batch, {}) if self._transit is None else self._transit.place(batch)
        if self._copies is not None and any(
            row.tier == "host" and not row.gated for row in placement.batch.rows
        ):
            self._copies.finish_stores()  # the torch twin reads the host's pages by itself
        halves = self._flatten(placement)
        step = halves[0] if len(halves) == 1 else end_to_end(*halves)
        self._rows = {}
        previous = previous_tokens(step, self._sampled)
        ended = None
        if not step.rows:
            return LaunchedStep(step, torch.empty(0, dtype=torch.int64), None, None)
        if self._graphs is not None and self._graphs.takes(step):
            logits = self._graphs.run(step)
            logprobs = draw_special(step, logits, previous, self._sampled)
        else:
            if step.num_gated:
                logits, ended = self._gated_model().forward(batch.number, halves, self._sampled)
            else:
                logits = self._model.forward(step, self._sampled)
            if self._fast:
                draw_plain(step, logits, self._sampled)
            logprobs = draw_special(step, logits, previous, self._sampled, everyone=not self._fast)
        self._rows = {row.request_id: index for index, row in enumerate(step.rows) if row.sample}
        launched = replace(self._to_host(step, logprobs, ended), begun=begun)
        if self._transit is not None:
            self._transit.depart(batch, placement)
        return launched

    def copy(self, job: CopyJob) -> torch.cuda.Event | None:
        """Start moving the pages of `job`; the event passes at its end, None if it has ended."""
        if job.kind == "land":
            return self._transit.landing(job.request_id) if self._transit is not None else None
        if self._copies is None:
            self._pools.copy("host" if job.kind == "load" else "gpu", job.source, job.target)
            return None
        if job.kind == "load":
            return self._copies.load(job.source, job.target)
        return self._copies.store(job.source, job.target)

    def assist_seconds(self, rows: int, copies: bool) -> float:
        """As the executor's method."""
        if self._assist is None:
            raise EngineError("only a GPU that assists can be asked what it takes")
        return self._assist.seconds_without_turns(rows, copies=copies)

    def close(self) -> None:
        """Let go of the mailbox and the arena. Nothing may be under way but assisted iterations,
        which are given up."""
        if self._assist is not None:
            self._assist.close()
            self._assist = None
        if self._gated is not None:
            self._gated.close()
            self._gated = None
        if self._registration is not None:
            self._registration.close()

    def _flatten(self, placement: Placement) -> list[StepInput]:
        """The step, or the halves of a gated one."""
        batch = placement.batch
        halves = [batch]
        if any(row.gated for row in batch.rows):
            halves = [Batch(batch.number, rows) for rows in batch.halves]
        return [
            flatten(half, self._config.page_tokens, self._rows, placement.far) for half in halves
        ]

    def _gated_model(self) -> GatedModel:
        if self._gated is None:
            raise EngineError("this engine has no gated steps")
        return self._gated

    def _to_host(
        self, step: StepInput, logprobs: PackedLogprobs | None, ended: Callable[[], None] | None
    ) -> LaunchedStep:
        tokens = self._sampled[: len(step.rows)]
        if self._device.type == "cpu":
            return LaunchedStep(step, tokens.clone(), logprobs, None, ended)
        arrived = torch.cuda.Event(blocking=True, enable_timing=self._timed)
        if logprobs is not None:
            logprobs = PackedLogprobs(logprobs.rows, fetch(logprobs.packed))
        on_host = fetch(tokens)
        arrived.record()
        return LaunchedStep(step, on_host, logprobs, arrived, ended)

    def _use_pools(self) -> None:
        """Set up `gpu_pages` pages; behind them one that nobody uses, which graphs need, and those
        in which prompts for the host are computed."""
        pages = self.gpu_pages + self._fast + self._transit_pages
        with device_alone("allocating the KV pool"):
            gpu = new_pool(self._spec, pages, self._config.page_tokens, self._dtype, self._device)
        self._pools = KVPools(gpu=gpu, host=self._host)
        self._copies: PageCopies | None = None
        self._transit: Transit | None = None
        if self._device.type == "cuda":
            self._copies = PageCopies(self._pools, self._piece)
            if self._transit_pages:
                first = pages - self._transit_pages
                self._transit = Transit(
                    self._copies, first, self._transit_pages, self._config.page_tokens
                )
        self._model: StepModel
        if self._fast and self._copies is not None:
            self._model = FlashInferModel(self._weights, self._spec, self._pools, self._copies)
        else:
            self._model = TorchModel(self._weights, self._spec, self._pools)

    def _capture(self) -> _Captured | None:
        if not isinstance(self._model, FlashInferModel):
            return None
        layers = self._model.layers
        self._model.graphs = LayerGraphs(layers, self._sampled, self._config.max_num_batched_tokens)
        decode = DecodeGraphs(
            self._model, self._sampled, self._config.max_num_seqs, scratch_page=self.gpu_pages
        )
        assist: list[SlotGraphs] = []
        gated: LayerGraphs | None = None
        if self._mailbox is not None and self._config.policy == "gated":
            gated = LayerGraphs(layers, self._sampled, self._config.max_num_batched_tokens)
        elif self._mailbox is not None:
            assist = [SlotGraphs(layers, self._mailbox.mailbox, slot) for slot in range(SLOTS)]
        return _Captured(decode, assist, gated)


@dataclass(frozen=True)
class _Captured:
    decode: DecodeGraphs
    assist: list[SlotGraphs]
    gated: LayerGraphs | None  # of second halves
