"""Whole decoding of tiny random models, token by token, against transformers in float32."""

from __future__ import annotations

import os
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from dualpace.core.errors import ConfigError, ModelError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.cpu import _native
from dualpace.cpu.model import CpuModel
from dualpace.cpu.sampling import sampling_arrays

PAGE_TOKENS = 16
GREEDY = DecodeParams()

# hidden size, heads, KV heads, head size, tied embeddings: no multiples of 16 or 8, and heads that
# are not hidden size / heads.
SHAPES = {
    "llama": (48, 4, 1, 20, False),
    "llama-no-groups": (36, 3, 3, 12, False),
    "mistral": (40, 6, 2, 16, True),
    "qwen2": (96, 6, 2, 16, True),
    "qwen3": (64, 8, 1, 32, False),
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@pytest.fixture(params=SHAPES)
def oracle(request) -> transformers.PreTrainedModel:
    """A tiny float32 model whose every weight matters: norms off one, biases off zero."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    make_config, make_model = CLASSES[request.param.split("-")[0]]
    hidden_size, heads, kv_heads, head_dim, tied = SHAPES[request.param]
    config = make_config(
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        vocab_size=211,
        intermediate_size=100,
        num_hidden_layers=3,
        max_position_embeddings=512,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    model = make_model(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.add_(0.3 * torch.randn_like(value))
            elif "embed" not in name:
                value.mul_(1.5)
    return model


def spec_of(oracle: transformers.PreTrainedModel) -> ModelSpec:
    c = oracle.config
    return ModelSpec(
        architecture=type(oracle).__name__,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        inv_freq=tuple(oracle.model.rotary_emb.inv_freq.tolist()),
        tie_embeddings=c.tie_word_embeddings,
        qkv_bias=c.model_type == "qwen2",
        qk_norm=c.model_type == "qwen3",
    )


def weights_of(oracle: transformers.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in oracle.named_parameters():
        name = name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
        name = name.replace("input_layernorm", "input_norm")
        name = name.replace("post_attention_layernorm", "post_norm")
        name = name.replace("_proj.bias", "_bias").removesuffix(".weight")
        yield name, value.detach().numpy()


def build(oracle, dtype="float32", isa="auto", threads=1) -> tuple[CpuModel, bytearray]:
    spec = spec_of(oracle)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    model = CpuModel(spec, weights_of(oracle), dtype=dtype, cores=cores, isa=isa)
    # All bits set: NaN in either dtype, wherever nothing was written.
    size = spec.page_bytes(PAGE_TOKENS, 4 if dtype == "float32" else 2)
    return model, bytearray(b"\xff" * (size * 24))


def row(token, position, pages, params=GREEDY, banned=()) -> BatchRow:
    return BatchRow("r", [token], position, pages, "host", True, params, banned)


@pytest.mark.parametrize(
    ("isa", "threads"), [(isa, n) for isa in _native.supported_isas() for n in (1, 2)]
)
def test_greedy_tokens_are_those_of_transformers(oracle, isa, threads):
    if threads > len(os.sched_getaffinity(0)):
        pytest.skip("one core only")
    model, arena = build(oracle, isa=isa, threads=threads)
    table = np.random.default_rng(5).permutation(24).reshape(3, 8).tolist()
    prompts = [[7], [3, 1, 4, 1, 5, 9, 2, 6], [(31 * i) % 211 for i in range(33)]]
    texts = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) + 64 for prompt in prompts]
    # Rows join one after another, so that one batch holds rows at different positions.
    for step in range(120):
        active = [r for r in range(3) if 0 <= step - 5 * r < lengths[r] - 1]
        rows = [row(texts[r][step - 5 * r], step - 5 * r, table[r]) for r in active]
        if not rows:
            break
        for r, token in zip(active, model.decode(rows, arena, PAGE_TOKENS).token_ids, strict=True):
            if step - 5 * r + 1 == len(texts[r]):
                texts[r].append(int(token))
    assert [len(text) for text in texts] == lengths
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([text[:-1]])).logits[0, len(prompt) - 1 :]
        assert text[len(prompt) :] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_bfloat16_logits_are_within_one_percent(oracle, isa):
    text = [(17 * i + 3) % 211 for i in range(40)]
    with torch.no_grad():
        # Weights as training starts with, and soft attention: a network that magnifies whatever is
        # rounded would say nothing about the engine.
        for name, value in oracle.named_parameters():
            if value.ndim == 2 and "embed" not in name:
                value.div_(1.5)
            if "q_proj" in name:
                value.mul_(0.5)
    model, arena = build(oracle, dtype="bfloat16", isa=isa)
    with torch.no_grad():
        for value in oracle.parameters():
            if value.ndim == 2:  # what the engine stores in bfloat16
                value.copy_(value.bfloat16().float())
        want = oracle(torch.tensor([text])).logits[0].numpy()
    got = np.concatenate(
        [
            model.decode([row(t, i, [4, 9, 2])], arena, PAGE_TOKENS, return_logits=True).logits
            for i, t in enumerate(text)
        ]
    )
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.fixture
def small() -> tuple[CpuModel, bytearray]:
    rng = np.random.default_rng(0)
    spec, weights = small_checkpoint(rng)
    model = CpuModel(spec, weights.items(), dtype="bfloat16", cores=[_core()], isa="portable")
    return model, bytearray(spec.page_bytes(PAGE_TOKENS, 2) * 3)


def _core() -> int:
    return min(os.sched_getaffinity(0))


def small_checkpoint(rng) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    spec = ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=50, hidden_size=8, intermediate_size=12,
        num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, rms_norm_eps=1e-5,
        inv_freq=(1.0, 0.01), tie_embeddings=False,
    )  # fmt: skip
    shapes = {
        "embed_tokens": (50, 8), "norm": (8,), "lm_head": (50, 8), "layers.0.input_norm": (8,),
        "layers.0.post_norm": (8,), "layers.0.q_proj": (8, 8), "layers.0.k_proj": (4, 8),
        "layers.0.v_proj": (4, 8), "layers.0.o_proj": (8, 8), "layers.0.gate_proj": (12, 8),
        "layers.0.up_proj": (12, 8), "layers.0.down_proj": (8, 12),
    }  # fmt: skip
    return spec, {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def test_the_sampled_token_is_that_of_the_sampler_at_the_next_position(small):
    model, arena = small
    params = DecodeParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, seed=2**64 - 5)
    decoded = model.decode([row(3, 0, [1], params, (5, 6))], arena, 16, return_logits=True)
    engine = _native.Engine([_core()], "portable")
    out = np.empty(1, np.int32)
    sampling = sampling_arrays([row(3, 0, [1], params, (5, 6))])
    engine.sample(decoded.logits, np.array([1]), sampling, out, None)
    assert decoded.token_ids.tolist() == out.tolist()


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (row(50, 0, [0]), "token id 50"),
        (row(-1, 0, [0]), "token id -1"),
        (row(2**40, 0, [0]), "out of range"),
        (row(1, -1, [0]), "position -1"),
        (row(1, 16, [0]), "position 16"),
        (row(1, 0, []), "position 0"),
        (row(1, 0, [3]), "page id 3"),
        (row(1, 20, [-1, 0]), "page id -1"),
        (row(1, 0, [2**32]), "out of range"),
        (row(1, 2**70, [0]), "out of range"),
        (row(1, 0, [0], banned=(50,)), "banned id 50"),
        (BatchRow("r", [1, 2], 0, [0], "host", True, GREEDY), "one token per row"),
    ],
)
def test_ids_and_positions_out_of_range_are_refused_untouched(small, bad, match):
    model, arena = small
    before = bytes(arena)
    with pytest.raises(ValueError, match=match):
        model.decode([row(1, 0, [0]), bad], arena, PAGE_TOKENS)
    assert bytes(arena) == before


def test_a_batch_without_rows_is_nothing_to_do(small):
    model, arena = small
    assert model.decode([], arena, PAGE_TOKENS).token_ids.tolist() == []


def test_an_arena_that_cannot_be_written_is_refused(small):
    model, arena = small
    with pytest.raises(BufferError):
        model.decode([row(1, 0, [0])], bytes(arena), PAGE_TOKENS)


def _changed(weights, **changes) -> list[tuple[str, np.ndarray]]:
    return list({**weights, **{k.replace("__", "."): v for k, v in changes.items()}}.items())


def test_tensors_that_do_not_fit_the_model_are_named():
    spec, weights = small_checkpoint(np.random.default_rng(0))

    def load(tensors):
        return CpuModel(spec, tensors, dtype="float32", cores=[_core()])

    zeros = np.zeros((2, 2), np.float32)
    load(weights.items())
    with pytest.raises(ModelError, match=r"missing tensors: lm_head"):
        load([item for item in weights.items() if item[0] != "lm_head"])
    with pytest.raises(ModelError, match=r"unknown tensor layers\.0\.q_bias"):
        load(_changed(weights, layers__0__q_bias=zeros))
    with pytest.raises(ModelError, match=r"unknown tensor layers\.1\.q_proj"):
        load(_changed(weights, layers__1__q_proj=zeros))
    with pytest.raises(ModelError, match=r"wrong shape of layers\.0\.up_proj.*\[2, 2\]"):
        load(_changed(weights, layers__0__up_proj=zeros))
    with pytest.raises(ModelError, match=r"given twice: norm"):
        load([*weights.items(), ("norm", weights["norm"])])
    with pytest.raises(ModelError, match=r"norm is float64"):
        load(_changed(weights, norm=np.zeros(8)))


def test_an_unknown_instruction_set_is_a_configuration_error():
    spec, weights = small_checkpoint(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="unknown instruction set 'mmx'"):
        CpuModel(spec, weights.items(), dtype="float32", cores=[_core()], isa="mmx")
