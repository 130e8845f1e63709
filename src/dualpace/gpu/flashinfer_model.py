"""`StepModel` for CUDA in bfloat16: FlashInfer's kernels, cuBLAS, and decodes as whole-step graphs.

Rows that have their KV on the host are attended by the torch twin, in the same step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.flashinfer_attention import (
    WORKSPACE_BYTES,
    BlockTables,
    DecodeAttention,
    PrefillAttention,
    flashinfer,
)
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.torch_attention import TorchAttention
from dualpace.gpu.torch_model import with_previous
from dualpace.gpu.upload import upload
from dualpace.models.reference import Weights

# Attention of one layer: query [N, heads, D] and qkv [N, (heads + 2·kv_heads)·D], both rotated, to
# [N, heads, D]. The layer's KV is in the GPU's pages already.
Attend = Callable[[int, Tensor, Tensor], Tensor]
HEAD_DIMS = (64, 128, 256)  # that FlashInfer's kernels are made for


class FlashInferModel:
    """Runs any step eagerly. `layers` is also what the decode graphs capture."""

    def __init__(self, weights: Weights, spec: ModelSpec, pools: KVPools) -> None:
        self.weights = weights
        self.spec = spec
        self.pools = pools
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weights.device)
        self._norm = flashinfer().norm
        self._silu_and_mul = flashinfer().activation.silu_and_mul
        self._decode = DecodeAttention(spec, pools.page_tokens, self.workspace)
        self._prefill = PrefillAttention(spec, pools.page_tokens, self.workspace)
        self._host = TorchAttention(pools, spec.group_size, weights.device)
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=weights.device)

    def forward(self, step: StepInput, previous: Tensor) -> tuple[Tensor, Tensor]:
        on_gpu = [span for span in step.spans if span.tier == "gpu"]
        decodes = on_gpu[: step.num_decodes]
        chunks = on_gpu[step.num_decodes :]
        here = sum(span.count for span in on_gpu)
        pool_pages = len(self.pools["gpu"])
        page_tokens = self.pools.page_tokens
        decode_tables = BlockTables.of(decodes, page_tokens, pool_pages)
        chunk_tables = BlockTables.of(chunks, page_tokens, pool_pages)
        elsewhere = np.full(len(step.tokens) - here, -1, dtype=np.int32)
        arrays = upload(
            {
                "tokens": step.tokens,
                "sources": step.sources,
                "positions": step.positions,
                "sampled": step.sampled_tokens,
                "pages": np.concatenate((decode_tables.pages, chunk_tables.pages, elsewhere)),
                "offsets": np.concatenate((decode_tables.offsets, chunk_tables.offsets, elsewhere)),
                "decode_indices": decode_tables.indices,
                "chunk_indices": chunk_tables.indices,
            },
            self.weights.device,
        )
        if decodes:
            self._decode.plan(decode_tables, arrays["decode_indices"], self.weights.dtype)
        if chunks:
            counts = [span.count for span in chunks]
            self._prefill.plan(counts, chunk_tables, arrays["chunk_indices"], self.weights.dtype)
        if here < len(step.tokens):
            self._host.plan([span for span in step.spans if span.tier == "host"])
        split = len(decodes)

        def attend(layer: int, query: Tensor, qkv: Tensor) -> Tensor:
            pool = self.pools["gpu"][:, layer]
            out = torch.empty_like(query)
            if decodes:
                self._decode.run(query[:split], pool, out[:split])
            if chunks:
                self._prefill.run(query[split:here], pool, out[split:here])
            if here < len(query):
                heads = qkv.view(len(qkv), -1, self.spec.head_dim)
                _, k, v = heads.split(
                    (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), dim=1
                )
                # Spans count from the step's first token.
                out[here:] = self._host.run(layer, query, k, v)[here:]
            return out

        tokens = with_previous(arrays["tokens"], arrays["sources"], previous)
        hidden = self.layers(
            tokens, arrays["positions"], arrays["pages"], arrays["offsets"], attend
        )
        return functional.linear(hidden[arrays["sampled"]], self.weights.lm_head), tokens

    def layers(
        self, tokens: Tensor, positions: Tensor, pages: Tensor, offsets: Tensor, attend: Attend
    ) -> Tensor:
        """Hidden states after the last norm, [N, H].

        tokens, positions: int64 [N]; pages, offsets: int32 [N], where KV goes on the GPU, page -1
        for nowhere.
        """
        from dualpace.gpu.triton_kernels import rotate_and_append

        spec, weights = self.spec, self.weights
        angles = positions.float()[:, None] * self._inv_freq
        rotary = (angles.cos(), angles.sin())
        pool = self.pools["gpu"]
        residual = functional.embedding(tokens, weights.embed)
        hidden = self._norm.rmsnorm(residual, weights.layers[0].input_norm, spec.rms_norm_eps)
        following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            qkv = functional.linear(hidden, layer.qkv, layer.qkv_bias)
            query = qkv.new_empty((len(qkv), spec.num_heads, spec.head_dim))
            norms = None
            if layer.q_norm is not None and layer.k_norm is not None:
                norms = (layer.q_norm, layer.k_norm)
            rotate_and_append(
                qkv, rotary, norms, spec.rms_norm_eps, pages, offsets, pool[:, index], query
            )
            attended = attend(index, query, qkv).view(-1, spec.q_size)
            hidden = functional.linear(attended, layer.o)
            self._norm.fused_add_rmsnorm(hidden, residual, layer.post_norm, spec.rms_norm_eps)
            gated = self._silu_and_mul(functional.linear(hidden, layer.gate_up))
            hidden = functional.linear(gated, layer.down)
            self._norm.fused_add_rmsnorm(hidden, residual, next_norm, spec.rms_norm_eps)
        return hidden


def fits(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """True where FlashInfer has kernels for the model; else the torch twin must do."""
    return dtype is torch.bfloat16 and spec.head_dim in HEAD_DIMS
