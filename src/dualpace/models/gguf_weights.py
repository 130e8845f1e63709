"""Tensors of a GGUF file, dequantized, in the layout that transformers uses.

Maps llama.cpp's tensor names to the canonical ones; shapes and dtypes are `weights`'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.gguf_file import GGUFFile
from dualpace.models.gguf_spec import ROPE_FACTORS
from dualpace.models.weights import weight_shapes

_TOP_NAMES = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_LAYER_NAMES = {
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
}


def read_tensors(path: Path, spec: ModelSpec) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield (canonical name, float32 array) for all that `spec` needs."""
    file = GGUFFile(path)
    names = {name: _stored_name(name) for name in weight_shapes(spec)}
    unknown = sorted(file.tensor_names - set(names.values()) - {ROPE_FACTORS})
    if unknown:
        raise ModelError(
            f"{path}: {len(unknown)} tensors do not belong to the architecture, "
            f"the first is {unknown[0]}"
        )
    # Only llama.cpp's "llama" converter reorders queries and keys, for interleaved rotation.
    interleaved = {}
    if file.value("general.architecture") == "llama":
        interleaved = {
            "q_proj": spec.num_heads,
            "k_proj": spec.num_kv_heads,
            "q_bias": spec.num_heads,
            "k_bias": spec.num_kv_heads,
        }
    for canonical, stored in names.items():
        array = file.tensor(stored)
        heads = interleaved.get(canonical.rpartition(".")[2])
        yield canonical, array if heads is None else _rotate_half_order(array, heads)


def _stored_name(canonical: str) -> str:
    if canonical in _TOP_NAMES:
        return _TOP_NAMES[canonical]
    _, index, name = canonical.split(".")
    return f"blk.{index}.{_LAYER_NAMES[name]}"


def _rotate_half_order(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows (2i, 2i+1) of each head become rows (i, i + head_dim/2)."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
