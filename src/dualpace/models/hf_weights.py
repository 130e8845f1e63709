"""Tensors of a Hugging Face directory: one safetensors file, or shards with an index.

Maps transformers' parameter names to the canonical ones; shapes and dtypes are `weights`'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.weights import weight_shapes

INDEX = "model.safetensors.index.json"
READABLE = ("BF16", "F16", "F32", "F64")

_TOP_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}


def read_tensors(folder: Path, spec: ModelSpec) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield (canonical name, array as stored) for all that `spec` needs."""
    files = _files_by_tensor(folder)
    names = {name: _stored_name(name) for name in weight_shapes(spec)}
    for canonical, stored in names.items():
        if stored not in files:
            raise ModelError(f"{folder}: tensor {stored} ({canonical}) is missing")
    _refuse_unknown(folder, files, set(names.values()))
    for canonical, stored in names.items():
        yield canonical, _read(files[stored], stored)


def _stored_name(canonical: str) -> str:
    if canonical in _TOP_NAMES:
        return _TOP_NAMES[canonical]
    _, index, name = canonical.split(".")
    return f"model.layers.{index}.{_LAYER_NAMES[name]}"


def _refuse_unknown(folder: Path, files: dict[str, Path], known: set[str]) -> None:
    """A tensor nobody asked for means another model than the config says: biases, scales, LoRA."""
    spare = {_TOP_NAMES["lm_head"]}  # written by some savers although the embeddings are tied
    unknown = sorted(
        name for name in files.keys() - known - spare if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise ModelError(
            f"{folder}: {len(unknown)} tensors do not belong to the architecture of config.json, "
            f"the first is {unknown[0]}"
        )


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: damaged index: {error!r}") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no safetensors files (load_format dummy needs none)")
    tensors: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                tensors |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: damaged or truncated safetensors file: {error}") from error
    return tensors


def _read(file: Path, name: str) -> npt.NDArray[Any]:
    try:
        with safe_open(file, framework="numpy") as opened:
            kind = opened.get_slice(name).get_dtype()
            if kind not in READABLE:
                raise ModelError(f"{file}: {name} is stored as {kind}, supported: {READABLE}")
            return np.asarray(opened.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot read tensor {name}: {error}") from error
