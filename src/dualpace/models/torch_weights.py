"""All weights of a model on one torch device, and how they get there.

Dummies are made on the device, safetensors are streamed through staging memory, anything else is
copied as it comes. Knows nothing of what the weights are for.

Shapes: H hidden size, D head_dim, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.core.model_spec import ModelSpec
from dualpace.models.dummy import PERIOD, DummyBlock, DummyTensor
from dualpace.models.safetensors_file import FileTensor
from dualpace.models.staging import Staging
from dualpace.models.tensors import Array, Weight


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
    tensors: Iterable[tuple[str, Weight]],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    """Put the tensors of `models.weights.iter_weights` into place, one at a time."""
    weights = _allocate(spec, device, dtype)
    places = _places(weights, spec)
    blocks: dict[DummyBlock, Tensor] = {}
    with Staging(device) as staging:
        for name, tensor in tensors:
            place = places.pop(name)
            match tensor:
                case DummyTensor(block, offset):
                    if block not in blocks:
                        blocks[block] = _as_tensor(block.values).to(device)
                    _repeat(blocks[block], offset, place)
                case FileTensor():
                    staging.copy(tensor, place)
                case _:
                    place.copy_(_as_tensor(np.asarray(tensor)))
    if places:
        raise ValueError(f"weights left unfilled: {', '.join(sorted(places)[:3])}")
    return weights


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


def _repeat(block: Tensor, offset: int, place: Tensor) -> None:
    """Fill `place` with a `DummyTensor`: one period, and then twice as much with every copy."""
    flat = place.view(-1)
    filled = min(len(flat), PERIOD)
    head = min(filled, PERIOD - offset)
    flat[:head] = block[offset : offset + head]
    flat[head:filled] = block[: filled - head]
    while filled < len(flat):
        more = min(filled, len(flat) - filled)
        flat[filled : filled + more] = flat[:more]
        filled += more


def _as_tensor(array: Array) -> Tensor:
    """A CPU tensor over a float32 or ml_dtypes bfloat16 array, which torch does not know."""
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
