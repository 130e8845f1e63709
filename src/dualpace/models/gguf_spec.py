"""`ModelSpec` from the metadata of a GGUF file (architectures llama, qwen2, qwen3).

Knows llama.cpp's key names; the reading of the container is `gguf_file`'s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.gguf_file import GGUFFile
from dualpace.models.rope import FloatArray, inverse_frequencies
from dualpace.models.spec import checked

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"


def spec_from_gguf(path: Path) -> ModelSpec:
    """The shape of the model in the GGUF file `path`. Raises `ModelError` naming the file."""
    file = GGUFFile(path)
    try:
        return _spec(file)
    except ModelError as error:
        raise ModelError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _spec(file: GGUFFile) -> ModelSpec:
    arch = file.value("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {arch!r}: supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    if file.value(f"{arch}.expert_count", 0):
        raise ModelError("mixture-of-experts models are not supported")
    if any(name.endswith("attn_output.bias") for name in file.tensor_names):
        raise ModelError("a bias on the output projection is not supported")
    hidden_size = _count(file, f"{arch}.embedding_length")
    num_heads = _count(file, f"{arch}.attention.head_count")
    head_dim = _count(file, f"{arch}.attention.key_length", hidden_size // num_heads)
    if _count(file, f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different length are not supported")
    positions = _count(file, f"{arch}.context_length")
    window = file.value(f"{arch}.attention.sliding_window") or positions
    return checked(
        ModelSpec(
            architecture=ARCHITECTURES[arch],
            vocab_size=file.shape("token_embd.weight")[0],
            hidden_size=hidden_size,
            intermediate_size=_count(file, f"{arch}.feed_forward_length"),
            num_layers=_count(file, f"{arch}.block_count"),
            num_heads=num_heads,
            num_kv_heads=_count(file, f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(file.value(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
            inv_freq=tuple(float(frequency) for frequency in _frequencies(file, arch, head_dim)),
            tie_embeddings="output.weight" not in file.tensor_names,
            qkv_bias="blk.0.attn_q.bias" in file.tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensor_names,
            max_position_embeddings=min(positions, int(window)),
            eos_ids=_end_ids(file),
        )
    )


def _frequencies(file: GGUFFile, arch: str, head_dim: int) -> FloatArray:
    if _count(file, f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError("partial rotary embeddings are not supported")
    inv_freq = inverse_frequencies(float(file.value(f"{arch}.rope.freq_base", 10000.0)), head_dim)
    kind = file.value(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind!r} is not supported (none and linear are)")
    factor = file.value(f"{arch}.rope.scaling.factor", file.value(f"{arch}.rope.scale_linear", 1.0))
    if kind == "linear" or file.value(f"{arch}.rope.scaling.type") is None:
        inv_freq = inv_freq / np.float32(factor)
    if ROPE_FACTORS in file.tensor_names:
        # llama.cpp's spelling of llama3 scaling: one divisor for each frequency.
        factors = file.tensor(ROPE_FACTORS)
        if factors.shape != inv_freq.shape:
            raise ModelError(f"{ROPE_FACTORS} has shape {factors.shape}, not {inv_freq.shape}")
        inv_freq = inv_freq / factors
    return inv_freq


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    """End of sequence, and end of turn where the file knows one."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(sorted({int(file.value(key)) for key in keys if file.value(key) is not None}))


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.value(key, default)
    if value is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be one positive integer, got {value!r}")
    return value
