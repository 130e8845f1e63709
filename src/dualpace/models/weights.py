"""A checkpoint's weights under canonical names, one tensor at a time.

    embed_tokens [V, H]        norm [H]        lm_head [V, H] unless embeddings are tied
    layers.{i}. input_norm [H] q_proj [heads·D, H] k_proj v_proj [kv_heads·D, H] o_proj [H, heads·D]
                q_bias k_bias v_bias (with qkv_bias)   q_norm k_norm [D] (with qk_norm)
                post_norm [H]  gate_proj up_proj [I, H]  down_proj [H, I]

Matrices are [out, in]; queries and keys are in the rotate-half order. Knows no torch, and never
holds more than the tensor at hand; where an engine can fill its memory by itself, not even that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from dualpace.core.config import DType
from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.dummy import DummyBlock, DummyTensor
from dualpace.models.registry import ModelSource
from dualpace.models.tensors import NUMPY_DTYPES, Weight, converted


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of everything the model needs, in loading order."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "q_proj": (spec.q_size, hidden),
            "k_proj": (spec.kv_size, hidden),
            "v_proj": (spec.kv_size, hidden),
        }
        if spec.qkv_bias:
            layer |= {
                "q_bias": (spec.q_size,),
                "k_bias": (spec.kv_size,),
                "v_bias": (spec.kv_size,),
            }
        if spec.qk_norm:
            layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        layer |= {
            "o_proj": (hidden, spec.q_size),
            "post_norm": (hidden,),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab_size, hidden)
    return shapes


def iter_weights(
    source: ModelSource,
    spec: ModelSpec,
    dtype: DType,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
) -> Iterator[tuple[str, Weight]]:
    """Yield (canonical name, tensor whose array is of `dtype`), each name of `weight_shapes` once.

    The order is that of the bytes in the files, so that each is read once from end to end. "dummy"
    reads no file: normal values × 0.02 and norms of 1, a function of `seed` and name only.
    Raises `ModelError` naming file and tensor for what is missing, damaged or misshapen, and for
    a tensor that the model would have to use but DualPace does not know.
    """
    target = NUMPY_DTYPES[dtype]
    stored: Iterator[tuple[str, Weight]]
    if load_format == "dummy":
        stored = _dummy_tensors(spec, DummyBlock(seed, target))
    elif source.kind == "gguf":
        from dualpace.models import gguf_weights

        tensors = gguf_weights.read_tensors(source.path, spec)
        stored = ((name, converted(array, target)) for name, array in tensors)
    else:
        from dualpace.models import hf_weights

        stored = hf_weights.read_tensors(source.path, spec, target)
    shapes = weight_shapes(spec)
    for name, tensor in stored:
        if tensor.shape != shapes[name]:
            raise ModelError(
                f"{source.path}: {name} has shape {tensor.shape}, the model needs {shapes[name]}"
            )
        yield name, tensor


def is_norm(name: str) -> bool:
    """True for the weight of a norm (canonical names)."""
    return name.endswith("norm")


def _dummy_tensors(spec: ModelSpec, block: DummyBlock) -> Iterator[tuple[str, Weight]]:
    for name, shape in weight_shapes(spec).items():
        if is_norm(name):
            yield name, np.ones(shape, dtype=block.values.dtype)
        else:
            yield name, DummyTensor.named(name, shape, block)
