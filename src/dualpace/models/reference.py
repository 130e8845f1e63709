"""The forward pass in plain torch: any device, bfloat16 or float32, attention left to the caller.

This is what the model computes; every faster path is compared with it. It follows transformers'
rounding: norms in float32, rotary angles in float32, everything else in the weights' dtype. Knows
no pages, requests or batches, only a flat run of tokens with their positions.

Shapes: N tokens, H hidden size, D head_dim, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from dualpace.core.model_spec import ModelSpec


class Attend(Protocol):
    """Attention of one layer: stores k and v, and lets q see its whole context."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D], rotated; returns [N, heads, D]."""
        ...


@dataclass
class LayerWeights:
    """One decoder layer; matrices are [out, in], q, k, v and gate, up fused along out."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2·kv_heads)·D, H]
    qkv_bias: Tensor | None  # [(heads + 2·kv_heads)·D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, heads·D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2·I, H]
    down: Tensor  # [H, I]


@dataclass
class Weights:
    """All weights of a model on one device, in one dtype."""

    embed: Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]; `embed` itself where tied

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype


def load_weights(
    tensors: Iterable[tuple[str, npt.NDArray[Any]]],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    """Put the tensors of `models.weights.iter_weights` into place, one at a time."""
    weights = _allocate(spec, device, dtype)
    places = _places(weights, spec)
    for name, array in tensors:
        places.pop(name).copy_(_as_tensor(array))
    if places:
        raise ValueError(f"weights left unfilled: {', '.join(sorted(places)[:3])}")
    return weights


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


def _allocate(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Weights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, qkv_size = spec.hidden_size, spec.q_size + 2 * spec.kv_size
    embed = empty(spec.vocab_size, hidden)
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_size, hidden),
            qkv_bias=empty(qkv_size) if spec.qkv_bias else None,
            q_norm=empty(spec.head_dim) if spec.qk_norm else None,
            k_norm=empty(spec.head_dim) if spec.qk_norm else None,
            o=empty(hidden, spec.q_size),
            post_norm=empty(hidden),
            gate_up=empty(2 * spec.intermediate_size, hidden),
            down=empty(hidden, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    ]
    lm_head = embed if spec.tie_embeddings else empty(spec.vocab_size, hidden)
    return Weights(embed=embed, layers=layers, norm=empty(hidden), lm_head=lm_head)


def _places(weights: Weights, spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name to the (part of a) tensor that it fills."""
    places = {"embed_tokens": weights.embed, "norm": weights.norm}
    if weights.lm_head is not weights.embed:
        places["lm_head"] = weights.lm_head
    qkv_sizes = (spec.q_size, spec.kv_size, spec.kv_size)
    for index, layer in enumerate(weights.layers):
        own: dict[str, Tensor] = {
            "input_norm": layer.input_norm,
            "o_proj": layer.o,
            "post_norm": layer.post_norm,
            "down_proj": layer.down,
        }
        own |= zip(("q_proj", "k_proj", "v_proj"), layer.qkv.split(qkv_sizes), strict=True)
        own |= zip(("gate_proj", "up_proj"), layer.gate_up.chunk(2), strict=True)
        if layer.qkv_bias is not None:
            own |= zip(("q_bias", "k_bias", "v_bias"), layer.qkv_bias.split(qkv_sizes), strict=True)
        if layer.q_norm is not None and layer.k_norm is not None:
            own |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        places |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    return places


def _as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """A CPU tensor over a float32 or ml_dtypes bfloat16 array, which torch does not know."""
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
