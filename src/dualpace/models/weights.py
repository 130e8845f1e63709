"""A checkpoint's weights under canonical names, one tensor at a time, as numpy arrays.

    embed_tokens [V, H]        norm [H]        lm_head [V, H] unless embeddings are tied
    layers.{i}. input_norm [H] q_proj [heads·D, H] k_proj v_proj [kv_heads·D, H] o_proj [H, heads·D]
                q_bias k_bias v_bias (with qkv_bias)   q_norm k_norm [D] (with qk_norm)
                post_norm [H]  gate_proj up_proj [I, H]  down_proj [H, I]

Matrices are [out, in]; queries and keys are in the rotate-half order. Knows no torch, and never
holds more than the tensor at hand (and, of random weights, a few that are drawn ahead).
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dualpace.core.config import DType
from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.registry import ModelSource

Array = npt.NDArray[Any]

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
DUMMY_SCALE = np.float32(0.02)
DUMMY_THREADS = 12  # each holds a tensor


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
) -> Iterator[tuple[str, Array]]:
    """Yield (canonical name, C-contiguous array of `dtype`) in the order of `weight_shapes`.

    "dummy" reads no file: normal values × 0.02 and norms of 1, a function of `seed` and name only.
    Raises `ModelError` naming file and tensor for what is missing, damaged or misshapen, and for
    a tensor that the model would have to use but DualPace does not know.
    """
    if load_format == "dummy":
        stored = _dummy_tensors(spec, seed)
    elif source.kind == "gguf":
        from dualpace.models import gguf_weights

        stored = gguf_weights.read_tensors(source.path, spec)
    else:
        from dualpace.models import hf_weights

        stored = hf_weights.read_tensors(source.path, spec)
    target = NUMPY_DTYPES[dtype]
    shapes = weight_shapes(spec)
    for name, array in stored:
        if array.shape != shapes[name]:
            raise ModelError(
                f"{source.path}: {name} has shape {array.shape}, the model needs {shapes[name]}"
            )
        if array.dtype != target and array.dtype != np.float32:
            array = array.astype(np.float32)  # ml_dtypes converts to and from float32 only
        yield name, np.ascontiguousarray(array.astype(target, copy=False))


def is_norm(name: str) -> bool:
    """True for the weight of a norm (canonical names)."""
    return name.endswith("norm")


def _dummy_tensors(spec: ModelSpec, seed: int) -> Iterator[tuple[str, Array]]:
    # Drawn ahead on several threads, for NumPy draws without the GIL: one thread makes 10⁸ numbers
    # a second, which is too slow for 8 billion.
    threads = min(DUMMY_THREADS, len(os.sched_getaffinity(0)))
    ahead: deque[tuple[str, Future[Array]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="dummy-weights") as pool:
        for name, shape in weight_shapes(spec).items():
            ahead.append((name, pool.submit(_dummy_tensor, name, shape, seed)))
            if len(ahead) == threads:
                yield _next_drawn(ahead)
        while ahead:
            yield _next_drawn(ahead)


def _next_drawn(ahead: deque[tuple[str, Future[Array]]]) -> tuple[str, Array]:
    name, drawn = ahead.popleft()
    return name, drawn.result()


def _dummy_tensor(name: str, shape: tuple[int, ...], seed: int) -> Array:
    if is_norm(name):
        return np.ones(shape, dtype=np.float32)
    # Seeded by name, so that a tensor does not depend on those drawn before it.
    generator = np.random.Generator(np.random.SFC64([seed % 2**64, zlib.crc32(name.encode())]))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= DUMMY_SCALE
    return values
