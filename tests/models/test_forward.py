"""Spec, weights and forward pass together against transformers' own fp32 logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from dualpace.models import reference
from dualpace.models.registry import ModelSource, resolve
from dualpace.models.spec import load_spec
from dualpace.models.torch_weights import load_weights
from dualpace.models.weights import iter_weights

# Far enough out that a rotary frequency that is off shows.
TOKENS = torch.arange(3, 103)


def our_logits(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    spec = load_spec(source)
    weights = load_weights(
        iter_weights(source, spec, "float32"), spec, torch.device("cpu"), torch.float32
    )

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.inference_mode():
        hidden = reference.forward(weights, spec, tokens, torch.arange(len(tokens)), attend)
        return reference.logits(weights, hidden)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"max_shard_size": "20KB"}),
        ("llama-tied", {}),
        ("llama-llama3-rope", {}),
        ("llama-linear-rope", {}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_logits_equal_transformers(
    kind: str, options: dict[str, Any], save_checkpoint: Callable[..., tuple[Path, Any]]
) -> None:
    folder, model = save_checkpoint(kind, **options)
    if options:
        assert (folder / "model.safetensors.index.json").is_file()
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
    actual = our_logits(resolve(str(folder)), TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_gguf_logits_equal_transformers() -> None:
    source = resolve("smollm2")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.path.parent), gguf_file=source.path.name, dtype=torch.float32
    )
    tokens = torch.tensor([1, 9690, 198, 2683, 359, 253, 5356, 5646])
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(source, tokens), expected, rtol=1e-3, atol=1e-3)
