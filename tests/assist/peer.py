"""One engine's end of a mailbox as a process of its own, for `test_failures.py` to hurt.

Usage: peer.py cpu|gpu DESCRIPTOR SPEC [TROUBLE LAYER]; prints a line once it is there. As "gpu" it
serves until it has computed LAYER, where it "dies" (SIGKILL) or "stops" (SIGSTOP). As "cpu" it
decodes one token after the other.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from dualpace.assist.mailbox import mailbox_layout, open_mailbox
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams

PAGE_TOKENS = 16


class Troubled:
    """A mailbox whose side comes to grief when it has computed a layer."""

    def __init__(self, mailbox: Any, trouble: str, layer: int) -> None:
        self._mailbox = mailbox
        self._trouble = trouble
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mailbox, name)

    def post_done(self, slot: int, layer: int) -> None:
        if layer == self._layer and self._trouble:
            stop = signal.SIGKILL if self._trouble == "dies" else signal.SIGSTOP
            os.kill(os.getpid(), stop)
        self._mailbox.post_done(slot, layer)


def serve(mailbox: Any, spec: ModelSpec, trouble: str, layer: int) -> None:
    import torch

    from dualpace.gpu.assist_service import TorchAssistService
    from dualpace.models.registry import ModelSource
    from dualpace.models.torch_weights import load_weights
    from dualpace.models.weights import iter_weights

    tensors = iter_weights(ModelSource(Path("/"), "hf"), spec, "float32", load_format="dummy")
    weights = load_weights(tensors, spec, torch.device("cpu"), torch.float32)
    service = TorchAssistService(mailbox, weights, spec, 1)
    service._mailbox = Troubled(mailbox, trouble, layer)
    print("there", flush=True)
    sys.stdin.read()  # until the test closes its end
    service.close()


def decode(mailbox: Any, spec: ModelSpec) -> None:
    from dualpace.cpu.model import CpuModel

    model = CpuModel(spec, None, dtype="float32", cores=(0,), mailbox=mailbox)
    arena = bytearray(spec.page_bytes(PAGE_TOKENS, 4))
    print("there", flush=True)
    token = 1
    while True:
        row = BatchRow("r", [token], 0, [0], "host", True, DecodeParams())
        token = int(model.decode([row], arena, PAGE_TOKENS, route="assist").token_ids[0])


def main(side: str, descriptor: str, spec_text: str, trouble: str = "", layer: str = "0") -> None:
    spec = msgspec.json.decode(spec_text, type=ModelSpec)
    layout = mailbox_layout(spec, "float32", 8, 64)
    if side == "gpu":
        serve(open_mailbox(int(descriptor), layout, "gpu"), spec, trouble, int(layer))
    else:
        decode(open_mailbox(int(descriptor), layout, "cpu"), spec)


if __name__ == "__main__":
    main(*sys.argv[1:])
