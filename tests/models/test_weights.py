"""Where weights come from: safetensors, GGUF, dummies; and what a bad checkpoint leads to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from safetensors.numpy import load_file, save_file

from dualpace.core.errors import ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.models.registry import ModelSource
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights, weight_shapes

Save = Callable[..., tuple[Path, Any]]
Tensors = dict[str, np.ndarray[Any, Any]]


def read(folder: Path, dtype: Any = "float32", **options: Any) -> Tensors:
    source = ModelSource(folder, "gguf" if folder.suffix == ".gguf" else "hf")
    tensors = iter_weights(source, load_spec(source), dtype, **options)
    return {name: np.asarray(tensor) for name, tensor in tensors}


def write_gguf(path: Path, arch: str, spec: ModelSpec, tensors: Tensors) -> None:
    """Write `tensors` (transformers' names) as llama.cpp's converter does."""
    writer = GGUFWriter(path, arch)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_block_count(spec.num_layers)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(spec.eos_ids[0])
    kinds: dict[str, MODEL_ARCH] = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[arch], spec.num_layers)
    for name, array in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = spec.num_heads if "q_proj" in name else spec.num_kv_heads
            halves = array.reshape(heads, 2, spec.head_dim // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, np.ascontiguousarray(array))
    if arch == "llama":
        writer.add_tensor("rope_freqs.weight", np.full(spec.head_dim // 2, 2.0, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf_holds_the_same_model_as_safetensors(
    kind: str, arch: str, save_checkpoint: Save
) -> None:
    folder, _ = save_checkpoint(kind)
    spec = load_spec(ModelSource(folder, "hf"))
    tensors = read(folder)
    path = folder / "model.gguf"
    write_gguf(path, arch, spec, load_file(folder / "model.safetensors"))
    converted = load_spec(ModelSource(path, "gguf"))
    slowed = 2.0 if arch == "llama" else 1.0  # rope_freqs are divisors
    assert np.allclose(np.array(converted.inv_freq) * slowed, spec.inv_freq)
    for field in ("architecture", "head_dim", "qkv_bias", "qk_norm", "tie_embeddings"):
        assert getattr(converted, field) == getattr(spec, field)
    reread = read(path)
    assert reread.keys() == tensors.keys() == weight_shapes(spec).keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(reread[name], array, err_msg=name)


def test_bfloat16_is_rounded_from_what_is_stored(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    wide, narrow = read(folder), read(folder, "bfloat16")
    for name, array in narrow.items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, wide[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_read(stored: Any, save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    file = folder / "model.safetensors"
    halves = {name: array.astype(stored) for name, array in load_file(file).items()}
    save_file(halves, file)
    embed = halves["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(read(folder)["embed_tokens"], embed)
    expected = embed.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read(folder, "bfloat16")["embed_tokens"], expected)


def test_dummy_weights_depend_on_the_seed_alone(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("qwen3")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    first, again = (read(folder, load_format="dummy", seed=3) for _ in range(2))
    other = read(folder, load_format="dummy", seed=4)
    assert {name: array.shape for name, array in first.items()} == weight_shapes(
        load_spec(ModelSource(folder, "hf"))
    )
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embed_tokens"], other["embed_tokens"])
    assert first["embed_tokens"].std() == pytest.approx(0.02, rel=0.05)
    assert (first["layers.0.q_norm"] == 1.0).all()


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _rewrite(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def _index_a_missing_file(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "gone.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors"),
        (_rewrite(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "layers.1.mlp.up_proj"),
        (
            _rewrite(lambda t: t.update({"model.norm.weight": np.ones(5, np.float32)})),
            "norm has shape",
        ),
        (
            _rewrite(lambda t: t.update({"model.norm.weight": np.ones(48, np.int8)})),
            "norm.weight is stored as I8",
        ),
        (
            _rewrite(lambda t: t.update({"model.norm.bias": np.ones(48, np.float32)})),
            "norm.bias",
        ),
        (_index_a_missing_file, "gone.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_bad_checkpoint_is_named(
    damage: Callable[[Path], Any], message: str, save_checkpoint: Save
) -> None:
    folder, _ = save_checkpoint("llama")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        read(folder)


@pytest.mark.parametrize("keep", [0, 3, 30, 300, -1000])
def test_a_truncated_gguf_is_named(keep: int, save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("qwen2")
    spec = load_spec(ModelSource(folder, "hf"))
    path = folder / "model.gguf"
    write_gguf(path, "qwen2", spec, load_file(folder / "model.safetensors"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        read(path)
