"""The forward pass in plain torch: any device, bfloat16 or float32, attention left to the caller.

This is what the model computes; every faster path is compared with it. It follows transformers'
rounding: norms in float32, rotary angles in float32, everything else in the weights' dtype. Knows
no pages, requests or batches, only a flat run of tokens with their positions.

Shapes: N tokens, H hidden size, D head_dim, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.model_spec import ModelSpec
from dualpace.models.torch_weights import LayerWeights, Weights


class Attend(Protocol):
    """Attention of one layer: stores k and v, and lets q see its whole context."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D], rotated; returns [N, heads, D]."""
        ...


def forward(
    weights: Weights, spec: ModelSpec, tokens: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """Hidden states after the last norm.

    tokens, positions: int64 [N]; returns [N, H] in the weights' dtype.
    """
    passage = Passage(weights, spec, tokens, positions)
    for layer in range(spec.num_layers):
        passage.leave(layer, attend(layer, *passage.qkv))
    return passage.normed()


class Passage:
    """Tokens on their way through the layers, at the attention of one: so others may go in between.

    qkv: what that attention needs, as `Attend` takes it.
    """

    def __init__(
        self, weights: Weights, spec: ModelSpec, tokens: Tensor, positions: Tensor
    ) -> None:
        """tokens, positions: int64 [N]."""
        self._weights = weights
        self._spec = spec
        self._hidden = functional.embedding(tokens, weights.embed)
        self._rotary = rotary_tables(spec, positions, weights.dtype)
        self.qkv = self._project(0)

    def leave(self, index: int, attended: Tensor) -> None:
        """The rest of layer `index` after its attention [N, heads, D], and the next one's `qkv`."""
        layer, eps = self._weights.layers[index], self._spec.rms_norm_eps
        hidden = self._hidden + functional.linear(attended.reshape(-1, self._spec.q_size), layer.o)
        normed = rms_norm(hidden, layer.post_norm, eps)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        self._hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        if index + 1 < self._spec.num_layers:
            self.qkv = self._project(index + 1)

    def normed(self) -> Tensor:
        """Hidden states after the last norm, [N, H]."""
        return rms_norm(self._hidden, self._weights.norm, self._spec.rms_norm_eps)

    def _project(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        layer = self._weights.layers[index]
        normed = rms_norm(self._hidden, layer.input_norm, self._spec.rms_norm_eps)
        return project_qkv(normed, layer, self._spec, self._rotary)


def logits(weights: Weights, hidden: Tensor) -> Tensor:
    """hidden [R, H] to float32 [R, V]."""
    return functional.linear(hidden, weights.lm_head).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32; dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotary_tables(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, D] for positions int64 [N]."""
    inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [N, heads, D]: dimension i with i + D/2."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def project_qkv(
    normed: Tensor, layer: LayerWeights, spec: ModelSpec, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, heads, D], k and v [N, kv_heads, D] of normed [N, H]; q and k rotated."""
    qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
    heads = qkv.view(len(qkv), -1, spec.head_dim)
    q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, spec.rms_norm_eps)
        k = rms_norm(k, layer.k_norm, spec.rms_norm_eps)
    return rotate(q, rotary), rotate(k, rotary), v
