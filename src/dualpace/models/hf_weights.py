"""Tensors of a Hugging Face directory: one safetensors file, or shards with an index.

Maps transformers' parameter names to the canonical ones; shapes and dtypes are `weights`'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.safetensors_file import FileTensor, SafetensorsFile
from dualpace.models.weights import weight_shapes

INDEX = "model.safetensors.index.json"

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


def read_tensors(
    folder: Path, spec: ModelSpec, dtype: np.dtype[Any]
) -> Iterator[tuple[str, FileTensor]]:
    """Yield (canonical name, tensor) for all that `spec` needs, file after file, in the order of
    their bytes."""
    files = _files_by_tensor(folder)
    names = {_stored_name(name): name for name in weight_shapes(spec)}
    for stored, canonical in names.items():
        if stored not in files:
            raise ModelError(f"{folder}: tensor {stored} ({canonical}) is missing")
    _refuse_unknown(folder, files, set(names))
    for path in sorted({files[stored] for stored in names}):
        file = SafetensorsFile(path)
        places = {stored: place for place, stored in enumerate(file.names)}
        here = [stored for stored in names if files[stored] == path]
        # What only the index puts here comes last, and is refused.
        for stored in sorted(here, key=lambda stored: places.get(stored, len(places))):
            yield names[stored], file.tensor(stored, dtype)


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
    return {name: file for file in files for name in SafetensorsFile(file).names}
