"""Weights without a checkpoint: the same on both engines, and random enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualpace.core.config import DType
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.cpu.model import CpuModel
from dualpace.models.dummy import PERIOD
from dualpace.models.registry import ModelSource
from dualpace.models.tensors import Weight
from dualpace.models.torch_weights import Weights, load_weights
from dualpace.models.weights import iter_weights

# The embedding is some periods of the repeated block, a bias a small part of one.
SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=40_009,
    hidden_size=80,
    intermediate_size=144,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    rms_norm_eps=1e-6,
    inv_freq=tuple(10000.0 ** (-i / 12) for i in range(12)),
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
)
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Arrays = dict[str, np.ndarray[Any, Any]]


def dummies(dtype: DType, seed: int = 0) -> dict[str, Weight]:
    nowhere = ModelSource(Path("/nowhere"), "hf")
    return dict(iter_weights(nowhere, SPEC, dtype, load_format="dummy", seed=seed))


def as_float32(dtype: DType, seed: int = 0) -> Arrays:
    return {name: np.asarray(x).astype(np.float32) for name, x in dummies(dtype, seed).items()}


def placed(weights: Weights) -> Arrays:
    """What the torch engine holds, under canonical names."""
    tensors = {"embed_tokens": weights.embed, "norm": weights.norm, "lm_head": weights.lm_head}
    q, kv = SPEC.q_size, SPEC.kv_size
    for index, layer in enumerate(weights.layers):
        assert layer.qkv_bias is not None
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        matrices, biases = layer.qkv.split((q, kv, kv)), layer.qkv_bias.split((q, kv, kv))
        own = {f"{name}_proj": matrix for name, matrix in zip("qkv", matrices, strict=True)}
        own |= {f"{name}_bias": bias for name, bias in zip("qkv", biases, strict=True)}
        own |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "o_proj": layer.o}
        own |= {"input_norm": layer.input_norm, "post_norm": layer.post_norm}
        own["gate_proj"], own["up_proj"] = layer.gate_up.chunk(2)
        own["down_proj"] = layer.down
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_engines_hold_the_same_dummies(dtype: DType) -> None:
    device, tensors = torch.device("cpu"), dummies(dtype)
    on_torch = placed(load_weights(tensors.items(), SPEC, device, TORCH_DTYPES[dtype]))
    arrays = as_float32(dtype)
    assert arrays["embed_tokens"].size > 3 * PERIOD
    assert on_torch.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(on_torch[name], array, err_msg=name)

    row = BatchRow(
        request_id="a", tokens=[9], start=0, pages=[0], tier="host", sample=True,
        params=DecodeParams(temperature=0.0),
    )  # fmt: skip
    logits = []
    for weights in (dummies(dtype).items(), arrays.items()):
        model = CpuModel(SPEC, weights, dtype=dtype, cores=(0,))
        arena = bytearray(model.page_bytes(16))
        logits.append(model.decode([row], arena, 16, return_logits=True).logits)
    np.testing.assert_array_equal(logits[0], logits[1])


def test_dummies_are_a_function_of_seed_and_name() -> None:
    first, again, other = as_float32("float32"), as_float32("float32"), as_float32("float32", 1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        assert name.endswith("norm") or not np.isin(array, other[name]).all()
    matrices = [array for name, array in first.items() if name.endswith(("k_proj", "v_proj"))]
    for i, matrix in enumerate(matrices):
        assert not any(np.array_equal(matrix, later) for later in matrices[i + 1 :])
    # A name's values do not hang on what else the model has.
    narrower = ModelSpec(**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__ if f != "qk_norm"})
    nowhere = ModelSource(Path("/nowhere"), "hf")
    tensors = dict(iter_weights(nowhere, narrower, "float32", load_format="dummy"))
    np.testing.assert_array_equal(tensors["layers.1.up_proj"], first["layers.1.up_proj"])


def test_rounding_is_the_only_difference_between_dtypes() -> None:
    wide, narrow = as_float32("float32"), as_float32("bfloat16")
    for name, array in wide.items():
        expected = torch.from_numpy(array).bfloat16().float().numpy()
        np.testing.assert_array_equal(narrow[name], expected)


@pytest.mark.parametrize("width", [80, 896, 1024, 4096])
def test_rows_of_a_dummy_matrix_have_nothing_in_common(width: int) -> None:
    rows = 3 * PERIOD // width
    spec = ModelSpec(
        **{f: getattr(SPEC, f) for f in SPEC.__struct_fields__}
        | {"vocab_size": rows, "hidden_size": width}
    )
    tensors = iter_weights(
        ModelSource(Path("/nowhere"), "hf"), spec, "float32", load_format="dummy"
    )
    matrix = np.asarray(next(tensors)[1])
    assert matrix.shape == (rows, width)
    normed = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    some = np.linspace(0, rows - 1, 200, dtype=int)
    cosines = normed[some] @ normed.T
    cosines[np.arange(len(some)), some] = 0.0
    # Of independent rows, the largest of so many cosines is about 5 standard deviations.
    assert np.abs(cosines).max() < 6.5 / np.sqrt(width)
    assert matrix.mean() == pytest.approx(0.0, abs=1e-3)
    assert matrix.std() == pytest.approx(0.02, rel=0.01)
