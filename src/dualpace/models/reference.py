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
    hidden = functional.embedding(tokens, weights.embed)
    rotary = rotary_tables(spec, positions, weights.dtype)
    for index, layer in enumerate(weights.layers):
        normed = rms_norm(hidden, layer.input_norm, spec.rms_norm_eps)
        q, k, v = project_qkv(normed, layer, spec, rotary)
        attended = attend(index, q, k, v).reshape(-1, spec.q_size)
        hidden = hidden + functional.linear(attended, layer.o)
        normed = rms_norm(hidden, layer.post_norm, spec.rms_norm_eps)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
    return rms_norm(hidden, weights.norm, spec.rms_norm_eps)


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
