"""A fingerprint, a tiny model, and a cache folder of the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualpace.profile.fingerprint import Fingerprint


@pytest.fixture
def fingerprint() -> Fingerprint:
    return Fingerprint(
        cpu="Some CPU", cpu_cores=6, cpu_isa="avx2", device="Some GPU", driver="12.9",
        torch="2.13.0", dualpace="0.1.0", architecture="llama", vocab_size=100, hidden_size=64,
        intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        qkv_bias=False, qk_norm=False, tie_embeddings=True, dtype="bfloat16", page_tokens=32,
        page_bytes=8192,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 120,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
