"""Either engine may die, stop or dawdle at any layer: the other's wait ends, and life goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dualpace.assist.mailbox import Mailbox, create_mailbox, mailbox_layout, open_mailbox
from dualpace.core.errors import AssistError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.cpu.model import CpuModel
from dualpace.gpu.assist_service import TorchAssistService
from dualpace.models.registry import ModelSource
from dualpace.models.torch_weights import load_weights
from dualpace.models.weights import iter_weights

PAGE_TOKENS = 16
SILENCE = 1.0  # seconds
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    inv_freq=tuple(100.0 ** (-i / 8) for i in range(8)),
    tie_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)
LAYOUT = mailbox_layout(SPEC, "float32", 8, 64)


def weights() -> Any:
    source = ModelSource(Path("/"), "hf")
    return iter_weights(source, SPEC, "float32", load_format="dummy")


@pytest.fixture
def descriptor() -> Iterator[int]:
    created = create_mailbox(LAYOUT)
    yield created
    os.close(created)


@contextmanager
def peer(side: str, descriptor: int, *trouble: str) -> Iterator[subprocess.Popen[str]]:
    """The other engine in a process of its own, which is reaped at the end only."""
    script = Path(__file__).with_name("peer.py")
    command = [sys.executable, str(script), side, str(descriptor), msgspec.json.encode(SPEC)]
    process = subprocess.Popen(
        [*command, *trouble],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class Decoder:
    """Rows that decode side by side, and what they would have said without any trouble."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.assisted = CpuModel(SPEC, None, dtype="float32", cores=(0,), mailbox=mailbox)
        self.alone = CpuModel(SPEC, weights(), dtype="float32", cores=(0,))
        size = 4 * SPEC.page_bytes(PAGE_TOKENS, 4)
        self.arena, self.reference = bytearray(size), bytearray(size)
        self.tokens = [[3], [5], [7], [11]]

    def step(self, route: Any = "assist2") -> None:
        """One more token for each row. Raises `AssistError`, and then nothing has changed."""
        rows = [
            BatchRow(f"r{i}", [tokens[-1]], len(tokens) - 1, [i], "host", True, DecodeParams())
            for i, tokens in enumerate(self.tokens)
        ]
        made = self.assisted.decode(rows, self.arena, PAGE_TOKENS, route=route)
        wanted = self.alone.decode(rows, self.reference, PAGE_TOKENS)
        assert made.token_ids.tolist() == wanted.token_ids.tolist()
        for tokens, token in zip(self.tokens, wanted.token_ids.tolist(), strict=True):
            tokens.append(token)


def open_cpu_end(descriptor: int, patience: float = 30.0) -> Mailbox:
    return open_mailbox(descriptor, LAYOUT, "cpu", patience=patience, silence=SILENCE)


@pytest.mark.parametrize(("trouble", "layer"), [("dies", 0), ("dies", 3), ("stops", 1)])
def test_a_gpu_engine_that_dies_fails_the_iteration_alone(
    descriptor: int, trouble: str, layer: int
) -> None:
    decoder = Decoder(open_cpu_end(descriptor))
    with pytest.raises(AssistError, match="gone"):
        decoder.step()  # nobody is there yet
    with peer("gpu", descriptor, trouble, str(layer)):
        started = time.monotonic()
        with pytest.raises(AssistError, match="gone"):
            decoder.step()
        assert time.monotonic() - started < 10 * SILENCE
    with peer("gpu", descriptor):
        for route in ("assist2", "assist", "assist2"):
            decoder.step(route)


class Interfering:
    """The service's mailbox; calls `interfere` whenever it has computed the layer."""

    def __init__(self, mailbox: Mailbox, layer: int, interfere: Callable[[], None]) -> None:
        self._mailbox, self._layer, self._interfere = mailbox, layer, interfere

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mailbox, name)

    def post_done(self, slot: int, layer: int) -> None:
        if layer == self._layer:
            self._interfere()
        self._mailbox.post_done(slot, layer)


@contextmanager
def serving(descriptor: int, layer: int, interfere: Callable[[], None]) -> Iterator[Mailbox]:
    """The GPU's end, served by this process."""
    mailbox = open_mailbox(descriptor, LAYOUT, "gpu", silence=SILENCE)
    there = load_weights(weights(), SPEC, torch.device("cpu"), torch.float32)
    service = TorchAssistService(mailbox, there, SPEC, 1)
    service._mailbox = Interfering(mailbox, layer, interfere)  # type: ignore[assignment]
    try:
        yield mailbox
    finally:
        service.close()


def fail() -> None:
    raise RuntimeError("as the test wishes")


def once(action: Callable[[], None]) -> Callable[[], None]:
    left = [action]
    return lambda: left.pop()() if left else None


@pytest.mark.parametrize("route", ["assist", "assist2"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_gpu_engine_that_fails_or_dawdles_serves_the_next_iteration(
    descriptor: int, route: str, layer: int
) -> None:
    for interfere, told in ((fail, "gave it up"), (lambda: time.sleep(2.0), "too long")):
        with serving(descriptor, layer, once(interfere)) as gpu_end:
            before = gpu_end.generation
            cpu_end = open_cpu_end(descriptor, patience=1.5)
            decoder = Decoder(cpu_end)
            with pytest.raises(AssistError, match=told):
                decoder.step(route)
            for _ in range(3):
                decoder.step(route)
            assert gpu_end.generation <= before + 2  # one for each slot
            cpu_end.close()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_cpu_engine_that_dies_leaves_the_gpu_engine_serving_the_next(
    descriptor: int, layer: int
) -> None:
    started: list[subprocess.Popen[str]] = []
    with serving(descriptor, layer, lambda: started[0].kill() if started else None) as gpu_end:
        before = gpu_end.generation
        with peer("cpu", descriptor) as process:
            started.append(process)
            deadline = time.monotonic() + 10 * SILENCE
            while gpu_end.generation == before:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        decoder = Decoder(open_cpu_end(descriptor))
        for route in ("assist2", "assist", "assist2"):
            decoder.step(route)


def test_what_cannot_be_asked_is_refused(descriptor: int) -> None:
    model = CpuModel(SPEC, None, dtype="float32", cores=(0,), mailbox=open_cpu_end(descriptor))
    arena = bytearray(SPEC.page_bytes(PAGE_TOKENS, 4))
    row = BatchRow("r", [1], 0, [0], "host", True, DecodeParams())
    with pytest.raises(ValueError, match="no weights"):
        model.decode([row], arena, PAGE_TOKENS, route="local")
    with pytest.raises(ValueError, match="1 to 8 rows, not 9"):
        model.decode([row] * 9, arena, PAGE_TOKENS, route="assist")
    with pytest.raises(ValueError, match="page id 1 is out of range"):
        model.decode([msgspec.structs.replace(row, pages=[1])], arena, PAGE_TOKENS, route="assist")
    without = CpuModel(SPEC, weights(), dtype="float32", cores=(0,))
    with pytest.raises(ValueError, match="no mailbox"):
        without.decode([row], arena, PAGE_TOKENS, route="assist")
