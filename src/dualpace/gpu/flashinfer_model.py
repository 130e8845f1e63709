"""`StepModel` for CUDA in bfloat16: a step of any kind on FlashInfer's attention and `CudaLayers`.

Rows that have their KV on the host are attended by the torch twin, in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.cuda_layers import (
    CudaLayers,
    EagerPassage,
    Flow,
    LayerPassage,
    TokenInputs,
)
from dualpace.gpu.far_context import FarContext
from dualpace.gpu.flashinfer_attention import (
    WORKSPACE_BYTES,
    BlockTables,
    DecodeAttention,
    LayerRuns,
    PrefillAttention,
    layer_caches,
)
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.layer_graphs import LayerGraphs
from dualpace.gpu.page_copies import PageCopies
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.torch_attention import TorchAttention
from dualpace.gpu.upload import upload
from dualpace.models.torch_weights import Weights

HEAD_DIMS = (64, 128, 256)  # that FlashInfer's kernels are made for


class StepAttention:
    """Attention of one step at a time, all but that of its gated rows: `plan`, `begin`, then a call
    for each layer in order."""

    def __init__(
        self, spec: ModelSpec, pools: KVPools, workspace: Tensor, copies: PageCopies
    ) -> None:
        """workspace: uint8 on the device, may be shared by steps on one stream."""
        self._spec = spec
        self._pools = pools
        self._caches = layer_caches(pools["gpu"])
        self._decode = DecodeAttention(spec, pools.page_tokens, workspace)
        self._prefill = PrefillAttention(spec, pools.page_tokens, workspace)
        self._far = FarContext(spec, pools.page_tokens, workspace, copies)
        self._host = TorchAttention(pools, spec.group_size, workspace.device)
        self._has_far = False
        # Tokens end to end: decodes, chunks of prompts, those with KV on the host, gated ones.
        self._decodes = self._on_gpu = self._planned = self._tokens = 0

    def plan(self, step: StepInput) -> dict[str, Tensor]:
        """Returns the step's arrays on the device, those of `TokenInputs` and `sampled`."""
        pool = self._pools["gpu"]
        on_gpu = [span for span in step.spans if span.tier == "gpu"]
        on_host = step.spans[len(on_gpu) : len(step.spans) - step.num_gated]
        decodes, chunks = on_gpu[: step.num_decodes], on_gpu[step.num_decodes :]
        self._decodes = len(decodes)
        self._on_gpu = sum(span.count for span in on_gpu)
        self._planned = self._on_gpu + sum(span.count for span in on_host)
        self._tokens = len(step.tokens)
        decode_tables = BlockTables.of(decodes, self._pools.page_tokens, len(pool))
        chunk_tables = BlockTables.of(chunks, self._pools.page_tokens, len(pool))
        elsewhere = np.full(self._tokens - self._on_gpu, -1, dtype=np.int32)
        arrays = upload(
            {
                "tokens": step.tokens,
                "sources": step.sources,
                "positions": step.positions,
                "pages": np.concatenate((decode_tables.pages, chunk_tables.pages, elsewhere)),
                "offsets": np.concatenate((decode_tables.offsets, chunk_tables.offsets, elsewhere)),
                "sampled": step.sampled_tokens,
                "decode_indices": decode_tables.indices,
                "chunk_indices": chunk_tables.indices,
            },
            pool.device,
        )
        if decodes:
            self._decode.plan(decode_tables, arrays["decode_indices"])
        if chunks:
            counts = [span.count for span in chunks]
            self._prefill.plan(counts, chunk_tables, arrays["chunk_indices"])
        far = [span for span in chunks if span.far]
        self._has_far = bool(far)
        self._far.plan(far, [span.far for span in far])
        if on_host:
            self._host.plan(on_host)
        return arrays

    def begin(self, flow: Flow) -> Callable[[int], None]:
        """What attends for a layer of the step and fills `flow.attended`. It alone, not this, holds
        on to the step's tensors: those of a step that fails are to be free at once."""
        split, here = self._decodes, self._on_gpu
        runs: list[LayerRuns] = []
        merge_far: Callable[[int], None] | None = None
        if split:
            runs.append(self._decode.begin(flow.query[:split], flow.attended[:split]))
        if split < here:
            lse = None
            if self._has_far:
                shape = (self._tokens, self._spec.num_heads)
                lse = torch.empty(shape, dtype=torch.float32, device=flow.query.device)
                merge_far = self._far.begin(flow.query, flow.attended, lse)
                lse = lse[split:here]
            runs.append(self._prefill.begin(flow.query[split:here], flow.attended[split:here], lse))
        # No closure: the frames of an error would keep what it has, cleared or not.
        return partial(self._attend, flow, runs, merge_far)

    def _attend(
        self,
        flow: Flow,
        runs: Sequence[LayerRuns],
        merge_far: Callable[[int], None] | None,
        layer: int,
    ) -> None:
        for run in runs:
            run(self._caches[layer])
        if merge_far is not None:
            merge_far(layer)
        here, planned = self._on_gpu, self._planned
        if here < planned:
            spec = self._spec
            heads = flow.qkv.view(self._tokens, -1, spec.head_dim)
            sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            _, k, v = heads.split(sizes, dim=1)
            attended = self._host.run(layer, flow.query, k, v)
            flow.attended[here:planned] = attended[here:planned]


class FlashInferModel:
    """Runs any step; with `graphs`, the smaller ones through them."""

    def __init__(
        self, weights: Weights, spec: ModelSpec, pools: KVPools, copies: PageCopies
    ) -> None:
        self.layers = CudaLayers(weights, spec, pools["gpu"])
        self.pools = pools
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weights.device)
        self.graphs: LayerGraphs | None = None
        self.attention = StepAttention(spec, pools, self.workspace, copies)

    def forward(self, step: StepInput, previous: Tensor) -> Tensor:
        weights = self.layers.weights
        arrays = self.attention.plan(step)
        passage = enter(self.layers, self.graphs, arrays, previous)
        attend = self.attention.begin(passage.flow)
        for index in range(self.layers.spec.num_layers):
            attend(index)
            hidden = passage.leave(index)
        return functional.linear(hidden[arrays["sampled"]], weights.lm_head)


def enter(
    layers: CudaLayers,
    graphs: LayerGraphs | None,
    arrays: Mapping[str, Tensor],
    previous: Tensor,
) -> LayerPassage:
    """Begin a step with what `StepAttention.plan` has returned, by graphs if they take it."""
    inputs = TokenInputs(**{name: arrays[name] for name in TokenInputs.__dataclass_fields__})
    if graphs is not None and graphs.takes(len(inputs.tokens)):
        return graphs.enter(inputs)
    return EagerPassage.enter(layers, inputs, previous)


def fits(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """True where FlashInfer has kernels for the model; else the torch twin must do."""
    return dtype is torch.bfloat16 and spec.head_dim in HEAD_DIMS
