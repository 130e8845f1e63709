"""The arithmetic between two attentions on CUDA in bfloat16, on buffers that the caller gives.

What it allocates itself does not outlive a call, so that it can be captured into graphs. Knows no
rows: where KV goes is told token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.flashinfer_attention import flashinfer
from dualpace.gpu.torch_model import with_previous
from dualpace.models.torch_weights import Weights


@dataclass(frozen=True)
class TokenInputs:
    """What is told of each of N tokens, on the device."""

    tokens: Tensor  # int64, 0 where only the device knows
    sources: Tensor  # int64, the row of the step before that sampled the token, or -1
    positions: Tensor  # int64
    pages: Tensor  # int32, page of the GPU's pool that its KV goes to, or -1 for nowhere
    offsets: Tensor  # int32, place in that page


@dataclass(frozen=True)
class Flow:
    """What is passed on from layer to layer, for N tokens."""

    cos: Tensor  # float32 [N, D/2]
    sin: Tensor  # float32 [N, D/2]
    residual: Tensor  # [N, H]
    qkv: Tensor  # [N, (heads + 2·kv_heads)·D], queries and keys rotated
    query: Tensor  # [N, heads, D], rotated
    attended: Tensor  # [N, heads, D], for the attention to fill

    @classmethod
    def new(cls, spec: ModelSpec, tokens: int, device: torch.device) -> Flow:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty((tokens, *shape), dtype=dtype, device=device)

        return cls(
            cos=empty(spec.head_dim // 2, dtype=torch.float32),
            sin=empty(spec.head_dim // 2, dtype=torch.float32),
            residual=empty(spec.hidden_size),
            qkv=empty(spec.q_size + 2 * spec.kv_size),
            query=empty(spec.num_heads, spec.head_dim),
            attended=empty(spec.num_heads, spec.head_dim),
        )

    def first(self, tokens: int) -> Flow:
        """Of the first `tokens` tokens."""
        return Flow(*(getattr(self, name)[:tokens] for name in self.__dataclass_fields__))


class LayerPassage(Protocol):
    """A step's tokens at the attention of a layer: whoever has filled `flow.attended` lets them
    `leave` it."""

    @property
    def flow(self) -> Flow: ...

    def leave(self, index: int) -> Tensor:
        """As `CudaLayers.leave`."""
        ...


class CudaLayers:
    """`enter`, then for each layer an attention, which the caller does, and `leave`."""

    def __init__(self, weights: Weights, spec: ModelSpec, pool: Tensor) -> None:
        """pool: the GPU's pages, [pages, layers, 2, kv_heads, page_tokens, D]."""
        self.weights = weights
        self.spec = spec
        self.pool = pool
        self._norm = flashinfer().norm
        self._silu_and_mul = flashinfer().activation.silu_and_mul
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=weights.device)

    def enter(self, inputs: TokenInputs, previous: Tensor, flow: Flow) -> None:
        """Embedding, and queries, keys and values of the first layer.

        previous: int64, tokens by row of the step before.
        """
        tokens = with_previous(inputs.tokens, inputs.sources, previous)
        angles = inputs.positions.float()[:, None] * self._inv_freq
        torch.cos(angles, out=flow.cos)
        torch.sin(angles, out=flow.sin)
        torch.index_select(self.weights.embed, 0, tokens, out=flow.residual)
        norm = self.weights.layers[0].input_norm
        hidden = self._norm.rmsnorm(flow.residual, norm, self.spec.rms_norm_eps)
        self._project(0, hidden, inputs, flow)

    def leave(self, index: int, inputs: TokenInputs, flow: Flow) -> Tensor:
        """The rest of layer `index` after its attention, and what the next one's attention needs.

        Returns the normed hidden states, [N, H]: after the last layer, the model's.
        """
        layers, eps = self.weights.layers, self.spec.rms_norm_eps
        layer = layers[index]
        last = index + 1 == len(layers)
        next_norm = self.weights.norm if last else layers[index + 1].input_norm
        hidden = functional.linear(flow.attended.flatten(1), layer.o)
        self._norm.fused_add_rmsnorm(hidden, flow.residual, layer.post_norm, eps)
        gated = self._silu_and_mul(functional.linear(hidden, layer.gate_up))
        hidden = functional.linear(gated, layer.down)
        self._norm.fused_add_rmsnorm(hidden, flow.residual, next_norm, eps)
        if not last:
            self._project(index + 1, hidden, inputs, flow)
        return hidden

    def _project(self, index: int, hidden: Tensor, inputs: TokenInputs, flow: Flow) -> None:
        from dualpace.gpu.triton_kernels import rotate_and_append

        layer = self.weights.layers[index]
        if layer.qkv_bias is None:
            torch.mm(hidden, layer.qkv.t(), out=flow.qkv)
        else:
            torch.addmm(layer.qkv_bias, hidden, layer.qkv.t(), out=flow.qkv)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm)
        rotate_and_append(
            flow.qkv, (flow.cos, flow.sin), norms, self.spec.rms_norm_eps,
            inputs.pages, inputs.offsets, self.pool[:, index], flow.query,
        )  # fmt: skip


@dataclass(frozen=True)
class EagerPassage:
    """`LayerPassage` kernel by kernel, for any number of tokens."""

    layers: CudaLayers
    inputs: TokenInputs
    flow: Flow

    @classmethod
    def enter(cls, layers: CudaLayers, inputs: TokenInputs, previous: Tensor) -> EagerPassage:
        """previous: as for `CudaLayers.enter`."""
        flow = Flow.new(layers.spec, len(inputs.tokens), layers.weights.device)
        layers.enter(inputs, previous, flow)
        return cls(layers, inputs, flow)

    def leave(self, index: int) -> Tensor:
        return self.layers.leave(index, self.inputs, self.flow)
