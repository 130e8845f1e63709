"""`ModelSpec` of a checkpoint: dispatch by kind, and reading a Hugging Face config.json.

Parses JSON itself: transformers' config classes import torch. Whatever would change the forward
pass in a way that DualPace does not compute is refused here, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.registry import ModelSource
from dualpace.models.rope import scaled_frequencies

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# What transformers assumes where a config.json leaves the key out.
_DEFAULT_POSITIONS = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
}


def load_spec(source: ModelSource) -> ModelSpec:
    """The shape of the checkpoint.

    Where a sliding window is active, `max_position_embeddings` is cut to it: up to that length
    windowed and full attention are the same. Raises `ModelError` for what is not supported.
    """
    if source.kind == "gguf":
        from dualpace.models.gguf_spec import spec_from_gguf

        return spec_from_gguf(source.path)
    config = _read_json(source.path / "config.json")
    try:
        return spec_from_config(config, _generation_config(source))
    except (ModelError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{source.path / 'config.json'}: {error}") from error


def default_sampling(source: ModelSource) -> dict[str, Any]:
    """Sampling options that the checkpoint's generation_config.json recommends, under their names
    in `SamplingParams`; none where it has no such file or samples greedily."""
    generation = _generation_config(source)
    if not generation.get("do_sample", False):
        return {}
    wanted = ("temperature", "top_k", "top_p", "min_p")
    return {name: generation[name] for name in wanted if generation.get(name) is not None}


def _generation_config(source: ModelSource) -> Mapping[str, Any]:
    path = source.path / "generation_config.json"
    return _read_json(path) if source.kind == "hf" and path.is_file() else {}


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """A spec from the contents of config.json and (maybe empty) generation_config.json."""
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    head_dim = _count(
        config,
        "head_dim",
        128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads,
    )
    positions = _count(config, "max_position_embeddings", _DEFAULT_POSITIONS[architecture])
    inv_freq = scaled_frequencies(_rope_parameters(config), head_dim, positions)
    window = _sliding_window(config, architecture)
    return checked(
        ModelSpec(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            inv_freq=tuple(float(frequency) for frequency in inv_freq),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            max_position_embeddings=positions if window is None else min(positions, window),
            eos_ids=tuple(
                sorted({*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})
            ),
        )
    )


def checked(spec: ModelSpec) -> ModelSpec:
    """`spec`, unless its numbers contradict each other (`ModelError`)."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} KV heads evenly"
        )
    if spec.head_dim % 2:
        raise ModelError(f"head_dim must be even, got {spec.head_dim}")
    for end in spec.eos_ids:
        # Beyond the vocabulary the engines could not ban it, of another type not even decode it.
        if type(end) is not int or not 0 <= end < spec.vocab_size:
            raise ModelError(
                f"eos_token_id {end!r} is not an id of the vocabulary of {spec.vocab_size}"
            )
    return spec


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ModelError(
            f"architecture {', '.join(map(str, names)) or 'not stated'}: "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return str(names[0])


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported (silu is)")
    if config.get("quantization_config"):
        raise ModelError("quantized checkpoints are not supported (GGUF files are)")
    # In these two families attention_bias puts a bias on the output projection as well.
    if config.get("attention_bias") and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        raise ModelError("attention_bias (it includes the output projection) is not supported")
    if config.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported")


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope dictionary of transformers 5, also from the older top-level spelling."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("rope parameters that differ by layer type are not supported")
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in config:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return parameters


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """The window if any layer attends through one."""
    window = config.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None
    layers = config.get("layer_types")
    if layers is not None:
        active = "sliding_attention" in layers
    elif architecture == "MistralForCausalLM":
        active = True
    else:
        # Layers from max_window_layers on are the windowed ones.
        full_layers = int(config.get("max_window_layers", 28))
        active = bool(config.get("use_sliding_window")) and full_layers < int(
            config["num_hidden_layers"]
        )
    return int(window) if active else None


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content
