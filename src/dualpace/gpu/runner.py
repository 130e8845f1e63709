"""Weights, pools and attention of one GPU (or its stand-in), and a step run to completion.

Synchronous and for one thread: order, tickets and the thread itself are the executor's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from dualpace.core.config import EngineConfig
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Batch, CopyJob
from dualpace.gpu.kv_pools import KVPools, arena_pool, new_pool
from dualpace.gpu.memory import largest_batch, measure_gpu_pages
from dualpace.gpu.sampler import sample
from dualpace.gpu.step_input import flatten
from dualpace.gpu.torch_attention import TorchAttention
from dualpace.models import reference
from dualpace.models.tensors import Weight
from dualpace.models.torch_weights import load_weights

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class ModelRunner:
    """Runs batches and copies, each complete on return. Used under `torch.inference_mode`."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Iterable[tuple[str, Weight]],
        arena: Any | None,
    ) -> None:
        """Parameters are those of `TorchExecutor`."""
        self._spec = spec
        self._page_tokens = config.page_tokens
        self._device = torch.device(config.device)
        dtype = DTYPES[config.dtype]
        self._weights = load_weights(weights, spec, self._device, dtype)
        host_pages = config.host_pages if arena is not None else 0
        if host_pages:
            host = arena_pool(arena, spec, host_pages, self._page_tokens, dtype)
        else:
            host = new_pool(spec, 0, self._page_tokens, dtype, torch.device("cpu"))
        gpu_pages = config.gpu_pages
        if gpu_pages is None:
            # The trial batch names nothing but page 0.
            self._use_pools(new_pool(spec, 1, self._page_tokens, dtype, self._device), host)
            trial = largest_batch(config)
            gpu_pages = measure_gpu_pages(config, self._device, lambda: self.step(trial))
        self._use_pools(new_pool(spec, gpu_pages, self._page_tokens, dtype, self._device), host)
        log.info("KV pools: %d GPU pages, %d host pages", gpu_pages, host_pages)

    @property
    def gpu_pages(self) -> int:
        return len(self._pools["gpu"])

    def step(self, batch: Batch) -> list[int | None]:
        """The sampled token of each row, None for a row that does not sample."""
        step = flatten(batch, self._page_tokens, self._device)
        outcome: list[int | None] = [None] * len(batch.rows)
        if not step.spans:
            return outcome
        self._attention.plan(step.spans)
        hidden = reference.forward(
            self._weights, self._spec, step.tokens, step.positions, self._attention.run
        )
        if step.sampled_rows:
            rows = [batch.rows[index] for index in step.sampled_rows]
            sampled = sample(
                reference.logits(self._weights, hidden[step.sampled_tokens]),
                [row.params for row in rows],
                [row.end for row in rows],
                [row.banned_ids for row in rows],
            )
            for index, token_id in zip(step.sampled_rows, sampled.tolist(), strict=True):
                outcome[index] = token_id
        return outcome

    def copy(self, job: CopyJob) -> None:
        """Move the pages of `job`."""
        self._pools.copy("host" if job.kind == "load" else "gpu", job.source, job.target)

    def _use_pools(self, gpu: torch.Tensor, host: torch.Tensor) -> None:
        self._pools = KVPools(gpu=gpu, host=host)
        self._attention = TorchAttention(self._pools, self._spec.group_size, self._device)
