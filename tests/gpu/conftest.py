"""A tiny random Llama, and the GPU engine's executors over it: torch's, and the one that stands in
for it where there is no GPU, which keeps the same contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dualpace.core.config import EngineConfig
from dualpace.core.model_spec import ModelSpec
from dualpace.cpu.model import CpuModel
from dualpace.cpu.standin import StandInExecutor
from dualpace.gpu.executor import TorchExecutor
from dualpace.models.registry import ModelSource
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights

PAGE_TOKENS = 16
GPU_PAGES = 12
HOST_PAGES = 16


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, Any]:
    """(source, the fp32 model of transformers)"""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=151,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval().float()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return ModelSource(Path(folder), "hf"), model


@pytest.fixture(scope="session")
def spec(checkpoint: tuple[ModelSource, Any]) -> ModelSpec:
    return load_spec(checkpoint[0])


@pytest.fixture(scope="session")
def config(spec: ModelSpec) -> EngineConfig:
    return EngineConfig(
        model="tiny",
        load_format="auto",
        dtype="float32",
        device="cpu",
        policy="dualpace",
        max_model_len=128,
        max_num_seqs=8,
        steps_in_flight=1,
        max_num_batched_tokens=64,
        page_tokens=PAGE_TOKENS,
        page_bytes=spec.page_bytes(PAGE_TOKENS, 4),
        gpu_pages=GPU_PAGES,
        gpu_memory_utilization=0.9,
        gpu_threads=1,
        host_pages=HOST_PAGES,
        cpu_ids=(0,),
        cpu_isa="auto",
        cpu_routes=("local",),
        host_weights=True,
        seed=0,
    )


@pytest.fixture
def arena(config: EngineConfig) -> bytearray:
    # All ones is a NaN in every float format: whoever reads an unwritten page finds out.
    return bytearray(b"\xff" * (HOST_PAGES * config.page_bytes))


needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["cpu", "stand-in", pytest.param("cuda", marks=needs_cuda)])
def executor(
    request: pytest.FixtureRequest,
    checkpoint: tuple[ModelSource, Any],
    spec: ModelSpec,
    config: EngineConfig,
    arena: bytearray,
) -> Iterator[TorchExecutor | StandInExecutor]:
    weights = iter_weights(checkpoint[0], spec, "float32")
    executor: TorchExecutor | StandInExecutor
    if request.param == "stand-in":
        model = CpuModel(spec, weights, dtype="float32", cores=config.cpu_ids)
        executor = StandInExecutor(model, GPU_PAGES, arena, PAGE_TOKENS, lambda: None)
    else:
        config = msgspec.structs.replace(config, device=request.param)
        executor = TorchExecutor(config, spec, weights, arena=arena, wake=lambda: None)
    yield executor
    executor.close()


@pytest.fixture(scope="session")
def greedy(checkpoint: tuple[ModelSource, Any]) -> Callable[[list[int], int], list[int]]:
    """greedy(prompt, n) -> n tokens of transformers' own generate"""

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = checkpoint[1].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=150,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    return generate


# Heads as wide as FlashInfer's kernels want them.
WIDE = dict(
    vocab_size=640, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=2, head_dim=128, max_position_embeddings=512,
    initializer_range=0.06,
)  # fmt: skip


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(source, transformers' model in float32 with weights that bfloat16 can hold)"""
    torch.manual_seed(5)
    reference: Any
    if request.param == "llama":
        reference = LlamaForCausalLM(LlamaConfig(**WIDE))
    else:
        reference = Qwen3ForCausalLM(Qwen3Config(**WIDE))
        for name, parameter in reference.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    # Only the parameters: `Module.bfloat16` would round the rotary frequencies as well.
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return ModelSource(Path(folder), "hf"), reference.eval().cuda()


@pytest.fixture(scope="session")
def wide_config(wide: Any) -> EngineConfig:
    spec = load_spec(wide[0])
    return EngineConfig(
        model="tiny", load_format="auto", dtype="bfloat16", device="cuda", policy="gpu-only",
        max_model_len=512, max_num_seqs=24, max_num_batched_tokens=2048, steps_in_flight=2,
        page_tokens=32, page_bytes=spec.page_bytes(32, 2), gpu_pages=120,
        gpu_memory_utilization=0.5, gpu_threads=1, host_pages=0, cpu_ids=(0,), cpu_isa="auto",
        cpu_routes=("local",), host_weights=True,
        seed=0,
    )  # fmt: skip
