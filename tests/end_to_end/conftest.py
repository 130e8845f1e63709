"""Both real engines in one process, stepped in turn, and transformers in fp32 as the oracle."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dualpace.assist.mailbox import create_mailbox, mailbox_layout, open_mailbox
from dualpace.core.config import DType, EngineConfig, PolicyName
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import CPU, FRONTEND, GPU, PeerUp, Submit, TokenEvent, Tokens
from dualpace.core.plan import Batch, Executor, Route, StepResult, Ticket, Tier
from dualpace.core.request import RequestState
from dualpace.cpu.executor import CpuExecutor
from dualpace.cpu.model import CpuModel
from dualpace.cpu.standin import StandInExecutor
from dualpace.cpu.threads import allowed_cores
from dualpace.gpu.executor import TorchExecutor
from dualpace.loop import EngineLoop
from dualpace.models.registry import ModelSource, resolve
from dualpace.models.spec import load_spec
from dualpace.models.weights import iter_weights
from dualpace.policy.view import Policy
from dualpace.scheduler.attendant import Attendant
from dualpace.scheduler.base import SchedulerBase
from dualpace.scheduler.cpu import CpuScheduler
from dualpace.scheduler.gated import GatedScheduler
from dualpace.scheduler.gated_cpu import GatedCpuScheduler
from dualpace.scheduler.gpu import GpuScheduler
from dualpace.sim.clock import VirtualClock
from dualpace.sim.network import Network

GpuKind = Literal["torch", "stand-in"]  # what the GPU engine runs on

PAGE_TOKENS = 16
STEPS = 64
REPETITION_PENALTY = 1.4


@dataclass
class Run:
    """What came out: token ids by request, and which engine made each; logprobs where asked; moves:
    what both schedulers have counted."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    engines: dict[str, list[str]] = field(default_factory=dict)
    moves: Counter[str] = field(default_factory=Counter)


class Rerouted:
    """The CPU engine's executor, whose batches go by the route that `route` says."""

    def __init__(self, executor: CpuExecutor, route: Callable[[Batch], Route]) -> None:
        self._executor = executor
        self._route = route
        self.copy = executor.copy
        self.close = executor.close

    def launch(self, batch: Batch) -> Ticket[StepResult]:
        return self._executor.launch(msgspec.structs.replace(batch, route=self._route(batch)))


class Engines:
    """The product's two engines over real weights; only processes and sockets are left out."""

    def __init__(
        self,
        source: ModelSource,
        dtype: DType,
        gpu: GpuKind,
        gpu_pages: int = 600,
        host_pages: int = 600,
        policy: PolicyName = "dualpace",
    ) -> None:
        spec = load_spec(source)
        page_bytes = spec.page_bytes(PAGE_TOKENS, 4 if dtype == "float32" else 2)
        self.config = EngineConfig(
            model=str(source.path),
            load_format="auto",
            dtype=dtype,
            device="cpu",
            policy=policy,
            max_model_len=spec.max_position_embeddings,
            max_num_seqs=256,
            max_num_batched_tokens=512,
            steps_in_flight=1,
            page_tokens=PAGE_TOKENS,
            page_bytes=page_bytes,
            gpu_pages=gpu_pages,
            gpu_memory_utilization=0.9,
            gpu_threads=2,
            host_pages=host_pages,
            cpu_ids=(0,),
            cpu_isa="auto",
            cpu_routes=("local",),
            host_weights=True,
            seed=0,
        )
        arena = bytearray(host_pages * page_bytes)
        self._spec = spec
        self._arena = arena
        self.route: Callable[[Batch], Route] = lambda batch: "local"
        cpu_end = gpu_end = None
        if gpu == "torch":
            layout = mailbox_layout(spec, dtype, 256, spec.max_position_embeddings)
            descriptor = create_mailbox(layout)
            cpu_end = open_mailbox(descriptor, layout, "cpu")
            gpu_end = open_mailbox(descriptor, layout, "gpu")
            os.close(descriptor)
        model = CpuModel(
            spec, iter_weights(source, spec, dtype), dtype=dtype, cores=(0,), mailbox=cpu_end
        )
        self.cpu: Executor = Rerouted(
            CpuExecutor(model, arena, PAGE_TOKENS, lambda: None), lambda batch: self.route(batch)
        )
        weights = iter_weights(source, spec, dtype)
        self.gpu: Executor
        if gpu == "stand-in":
            standin = CpuModel(spec, weights, dtype=dtype, cores=allowed_cores()[-1:])
            self.gpu = StandInExecutor(standin, gpu_pages, arena, PAGE_TOKENS, lambda: None)
        else:
            self.gpu = TorchExecutor(
                self.config, spec, weights, arena=arena, wake=lambda: None, mailbox=gpu_end
            )

    def run(self, policy: Policy, states: list[RequestState], gpu_depth: int = 1) -> Run:
        """Serve `states`, all submitted at once, until each has finished.

        gpu_depth: steps that the GPU engine has under way at once.
        """
        config = self.config
        clock = VirtualClock()
        network = Network(clock, lambda sender, to: 0.0)
        frontend = network.port(FRONTEND, lambda: None)
        schedulers = self._schedulers(policy)
        loops = [
            EngineLoop(scheduler, executor, network.port(name, lambda: None), clock, depth)
            for scheduler, executor, name, depth in zip(
                schedulers, (self.gpu, self.cpu), (GPU, CPU), (gpu_depth, 1), strict=True
            )
        ]
        frontend.send(GPU, PeerUp(1, "", config.host_pages))
        for state in states:
            frontend.send(GPU, Submit(state))
        run = Run(*({state.id: [] for state in states} for _ in range(3)))
        unfinished = len(states)
        while unfinished:
            clock.run()
            for loop in loops:
                loop.step()
                clock.run()
            # Both engines' steps run at the same time; then both are committed.
            tickets = [step[1] for loop in loops for step in loop.steps]
            tickets += [copy[1] for loop in loops for copy in loop.copies]
            wait([ticket for ticket in tickets if isinstance(ticket, Future)])
            for envelope in frontend.drain():
                body = envelope.body
                assert isinstance(body, Tokens) or "Stats" in type(body).__name__, body
                for event in body.events if isinstance(body, Tokens) else ():
                    unfinished -= _record(run, event, envelope.sender)
        for _ in range(4):  # let the endings be told
            clock.run()
            for loop in loops:
                loop.step()
        for scheduler in schedulers:
            scheduler.check_integrity()
            for pool in scheduler.pools:
                pool.check_integrity(idle=True)
            run.moves += scheduler.moves
        return run

    def kv_words(self, tier: Tier) -> NDArray[np.uint32]:
        """The pool's own memory, as [pages, layers, 2, kv_heads, page_tokens, words]."""
        spec = self._spec
        pool: Any
        if tier == "host":
            pool = self._arena
        elif isinstance(self.gpu, StandInExecutor):
            pool = self.gpu._pools["gpu"]
        else:
            pool = self.gpu._runner._pools["gpu"].numpy()
        shape = (-1, spec.num_layers, 2, spec.num_kv_heads, PAGE_TOKENS)
        words = np.frombuffer(pool, np.uint32)
        return words.reshape(*shape, words.size // np.prod(shape[1:]) // self._pages(tier))

    def _pages(self, tier: Tier) -> int:
        return self.config.host_pages if tier == "host" else self.config.gpu_pages or 0

    def _schedulers(self, policy: Policy) -> tuple[SchedulerBase, SchedulerBase]:
        gpu_pages, host_pages = self.config.gpu_pages or 0, self.config.host_pages
        if self.config.policy == "gated":
            gated = GatedScheduler(
                policy, gpu_pages, host_pages, PAGE_TOKENS, 256, 512, attendant=Attendant()
            )
            return gated, GatedCpuScheduler()
        return (
            GpuScheduler(policy, gpu_pages, PAGE_TOKENS, 256, 512),
            CpuScheduler(policy, host_pages, PAGE_TOKENS, 256),
        )

    def close(self) -> None:
        self.gpu.close()
        self.cpu.close()


def _record(run: Run, event: TokenEvent, engine: str) -> bool:
    assert event.index == len(run.tokens[event.request_id])
    run.tokens[event.request_id].append(event.token_id)
    run.engines[event.request_id].append(engine)
    if event.logprobs is not None:
        run.logprobs[event.request_id].append(event.logprobs)
    return event.finish is not None


MakeEngines = Callable[[ModelSource], Engines]


@pytest.fixture(scope="session")
def engines_by_kind() -> Iterator[Callable[[ModelSource, GpuKind], Engines]]:
    """Engines of a checkpoint in fp32, built once for all tests that ask for the same."""
    made: dict[tuple[ModelSource, GpuKind], Engines] = {}

    def make(source: ModelSource, kind: GpuKind) -> Engines:
        if (source, kind) not in made:
            made[source, kind] = Engines(source, "float32", kind)
        return made[source, kind]

    yield make
    for engines in made.values():
        engines.close()


@pytest.fixture(scope="session", params=["torch", "stand-in"])
def make_engines(request: pytest.FixtureRequest, engines_by_kind: Any) -> MakeEngines:
    """Engines whose GPU half runs on one and on the other."""
    return partial(engines_by_kind, kind=request.param)


@pytest.fixture
def make_gated_engines() -> Iterator[Callable[[ModelSource, int, int], Engines]]:
    """make(source, gpu_pages, host_pages): engines whose GPU half runs gated steps on torch."""
    made: list[Engines] = []

    def make(source: ModelSource, gpu_pages: int, host_pages: int) -> Engines:
        made.append(Engines(source, "float32", "torch", gpu_pages, host_pages, policy="gated"))
        return made[-1]

    yield make
    for engines in made:
        engines.close()


@pytest.fixture(scope="session")
def make_torch_engines(engines_by_kind: Any) -> MakeEngines:
    """Engines whose GPU half runs on torch, and assists the CPU's."""
    return partial(engines_by_kind, kind="torch")


def greedy(model: Any, prompt: list[int], count: int, **rules: Any) -> list[int]:
    """`count` greedy tokens of a transformers model, no end of sequence heeded."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **rules
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    assert len(tokens) == count
    return tokens


@dataclass
class Checkpoint:
    """A model on disk, prompts for it, and what transformers answers in fp32."""

    source: ModelSource
    prompts: list[list[int]]
    answers: list[list[int]]
    chat: list[int] = field(default_factory=list)
    chat_logits: Any = None  # [len(chat), vocab_size], of the weights rounded to bfloat16
    penalized: list[int] = field(default_factory=list)  # to the first prompt
    penalized_logprobs: Any = None  # [len(penalized), vocab_size]


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The embedded model; the oracle reads the GGUF file by transformers' own loader."""
    source = resolve("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    # "What is the capital of France?" and "Once upon a time", in SmolLM2's vocabulary.
    prompts = [[1780, 314, 260, 3575, 282, 4649, 47], [7900, 2402, 253, 655]]
    answers = [greedy(model, prompt, STEPS) for prompt in prompts]
    penalized = greedy(model, prompts[0], STEPS, repetition_penalty=REPETITION_PENALTY)
    with torch.inference_mode():
        scores = model(torch.tensor([prompts[0] + penalized])).logits[0, len(prompts[0]) - 1 : -1]
        logprobs = scores.double().log_softmax(dim=-1)
    # The default system prompt and the beginning of a question, in the chat template.
    chat = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
    chat += [407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2]
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(weight.bfloat16().float())
        logits = model(torch.tensor([chat])).logits[0].numpy()
    return Checkpoint(source, prompts, answers, chat, logits, penalized, logprobs)


@pytest.fixture(scope="session", params=["smollm2", "group1", "group3", "group4", "group8"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """SmolLM2, and random weights with that many query heads per KV head."""
    if request.param == "smollm2":
        smollm2: Checkpoint = request.getfixturevalue("smollm2")
        return smollm2
    return _tiny_llama(int(request.param.removeprefix("group")), tmp_path_factory)


@pytest.fixture(params=[1, 2])
def gpu_depth(request: pytest.FixtureRequest, checkpoint: Any) -> int:
    """Steps that the GPU engine has under way at once: as it is served, and for the small models
    one, too."""
    if request.param == 1 and checkpoint.source.path == resolve("smollm2").path:
        pytest.skip("depth 1 is told by the small models")
    return int(request.param)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint that starts in an instant."""
    return _tiny_llama(3, tmp_path_factory)


def _tiny_llama(group: int, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Random weights in a shape where head_dim is not hidden / heads."""
    torch.manual_seed(group)
    config = LlamaConfig(
        vocab_size=331,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        head_dim=20,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=group % 2 == 0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    prompts = [torch.randint(3, 331, (n,)).tolist() for n in (1, 15, 16, 17, 40)]
    answers = [greedy(model, prompt, STEPS) for prompt in prompts]
    return Checkpoint(ModelSource(Path(folder), "hf"), prompts, answers)


@pytest.fixture
def damaged(tiny: Checkpoint, tmp_path: Path) -> Path:
    """The checkpoint with half of its weights."""
    place = tmp_path / "broken"
    place.mkdir()
    for file in tiny.source.path.iterdir():
        data = file.read_bytes()
        (place / file.name).write_bytes(
            data[: len(data) // 2] if "safetensors" in file.name else data
        )
    return place


@pytest.fixture
def runs() -> Callable[[int], bool]:
    """True for a process that has not ended."""

    def runs(pid: int) -> bool:
        try:
            return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False

    return runs
