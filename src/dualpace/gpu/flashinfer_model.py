"""`StepModel` for CUDA in bfloat16: a step of any kind on FlashInfer's attention and `CudaLayers`.

Rows that have their KV on the host are attended by the torch twin, in the same step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.cuda_layers import CudaLayers, Flow, TokenInputs
from dualpace.gpu.far_context import FarContext
from dualpace.gpu.flashinfer_attention import (
    WORKSPACE_BYTES,
    BlockTables,
    DecodeAttention,
    PrefillAttention,
)
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.layer_graphs import LayerGraphs
from dualpace.gpu.page_copies import PageCopies
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.torch_attention import TorchAttention
from dualpace.gpu.upload import upload
from dualpace.models.torch_weights import Weights

HEAD_DIMS = (64, 128, 256)  # that FlashInfer's kernels are made for


class FlashInferModel:
    """Runs any step; with `graphs`, the smaller ones through them."""

    def __init__(
        self, weights: Weights, spec: ModelSpec, pools: KVPools, copies: PageCopies
    ) -> None:
        self.layers = CudaLayers(weights, spec, pools["gpu"])
        self.pools = pools
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weights.device)
        self.graphs: LayerGraphs | None = None
        self._decode = DecodeAttention(spec, pools.page_tokens, self.workspace)
        self._prefill = PrefillAttention(spec, pools.page_tokens, self.workspace)
        self._far = FarContext(spec, pools.page_tokens, self.workspace, copies)
        self._host = TorchAttention(pools, spec.group_size, weights.device)

    def forward(self, step: StepInput, previous: Tensor) -> Tensor:
        weights, spec, pool = self.layers.weights, self.layers.spec, self.pools["gpu"]
        on_gpu = [span for span in step.spans if span.tier == "gpu"]
        decodes, chunks = on_gpu[: step.num_decodes], on_gpu[step.num_decodes :]
        split, here, total = len(decodes), sum(span.count for span in on_gpu), len(step.tokens)
        decode_tables = BlockTables.of(decodes, self.pools.page_tokens, len(pool))
        chunk_tables = BlockTables.of(chunks, self.pools.page_tokens, len(pool))
        elsewhere = np.full(total - here, -1, dtype=np.int32)
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
            weights.device,
        )
        if decodes:
            self._decode.plan(decode_tables, arrays["decode_indices"])
        if chunks:
            counts = [span.count for span in chunks]
            self._prefill.plan(counts, chunk_tables, arrays["chunk_indices"])
        far = [span for span in chunks if span.far]
        self._far.plan(far, [span.far for span in far])
        if here < total:
            self._host.plan([span for span in step.spans if span.tier == "host"])

        def attend(layer: int, flow: Flow) -> None:
            pages = pool[:, layer]
            if decodes:
                self._decode.run(flow.query[:split], pages, flow.attended[:split])
            if far:
                lse = torch.empty((total, spec.num_heads), device=flow.query.device)
                lse[split:here] = self._prefill.run_with_lse(
                    flow.query[split:here], pages, flow.attended[split:here]
                )
                self._far.run(layer, flow.query, flow.attended, lse)
            elif chunks:
                self._prefill.run(flow.query[split:here], pages, flow.attended[split:here])
            if here < total:
                heads = flow.qkv.view(total, -1, spec.head_dim)
                sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
                _, k, v = heads.split(sizes, dim=1)
                flow.attended[here:] = self._host.run(layer, flow.query, k, v)[here:]

        names = TokenInputs.__dataclass_fields__
        inputs = TokenInputs(**{name: arrays[name] for name in names})
        if self.graphs is not None and self.graphs.takes(total):
            hidden = self.graphs.run(inputs, attend)
        else:
            flow = Flow.new(spec, total, weights.device)
            self.layers.enter(inputs, previous, flow)
            for index in range(spec.num_layers):
                attend(index, flow)
                hidden = self.layers.leave(index, inputs, flow)
        return functional.linear(hidden[arrays["sampled"]], weights.lm_head)


def fits(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """True where FlashInfer has kernels for the model; else the torch twin must do."""
    return dtype is torch.bfloat16 and spec.head_dim in HEAD_DIMS
