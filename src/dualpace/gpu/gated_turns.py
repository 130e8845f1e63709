"""The GPU engine's end of the mailbox in gated steps, which the CPU engine attends for.

The same words and areas as for assisted iterations (csrc/mailbox.h), but here the GPU engine's step
begins it: the CPU engine has been told of the step, and asks with its number. Each half of the step
that has host rows has a slot. Knows no rows, pages or layers' arithmetic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch import Tensor

from dualpace.assist.mailbox import SILENCE, SLOTS, Doorbell, Mailbox
from dualpace.core.errors import AssistError
from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.assist_service import SlotTensors


class GatedTurns:
    """One step at a time: `begin`, then for each layer and slot `post` and `attended` (or what does
    the same by a stream), then `finish`, or `give_up`."""

    def __init__(self, mailbox: Mailbox, spec: ModelSpec) -> None:
        self.mailbox = mailbox
        self.slots = [SlotTensors.of(mailbox, spec, slot) for slot in range(SLOTS)]
        # Where the layout's offsets count from, for words that a device waits for and writes.
        self.address = self.slots[0].tokens.data_ptr() - mailbox.layout.area(0, "tokens")[0]
        self._layers = spec.num_layers
        self._asked: dict[int, tuple[int, int]] = {}  # step and rows, by slot; not begun
        self._changed = threading.Condition()
        self._under_way: list[int] = []  # slots
        self._doorbell = Doorbell(mailbox, self._answer)

    def begin(self, step: int, rows: Sequence[int]) -> None:
        """Wait until the CPU engine has asked for its part of `step`: so many rows in each slot.

        What it has asked for an earlier step, it is refused. Raises `AssistError` if it does not
        come.
        """
        wanted = {slot: (step, count) for slot, count in enumerate(rows)}
        deadline = time.monotonic() + SILENCE
        with self._changed:
            while self._asked != wanted:
                old = [slot for slot, asked in self._asked.items() if asked != wanted.get(slot)]
                self._refuse(old)
                for slot in old:
                    del self._asked[slot]
                if not self._changed.wait(deadline - time.monotonic()):
                    self._refuse(list(self._asked))
                    self._asked.clear()
                    raise AssistError(f"step {step}: the CPU engine does not take part in it")
            self._asked.clear()
        self._under_way = list(wanted)

    def post(self, slot: int, layer: int, qkv: Tensor) -> None:
        """Have the CPU engine attend: [rows, heads + 2·kv_heads, D], rotated, on the host."""
        self.slots[slot].qkv[: len(qkv)] = qkv
        self.mailbox.post_done(slot, layer)

    def attended(self, slot: int, layer: int, rows: int) -> Tensor:
        """What it has attended to, [rows, heads, D]. Raises `AssistError` if it does not."""
        outcome = self.mailbox.wait_go(slot, layer)
        if outcome != "ready":
            raise AssistError(
                f"the CPU engine gave up its part of a step at layer {layer}: {outcome}"
            )
        return self.slots[slot].attended[:rows]

    def finish(self) -> None:
        """Every layer is done: let the CPU engine go."""
        for slot in self._under_way:
            self.mailbox.post_done(slot, self._layers)
            self.mailbox.finish(slot)
        self._under_way = []

    def give_up(self) -> None:
        """Nothing comes of the step under way, and the CPU engine is told so."""
        self._refuse(self._under_way)
        self._under_way = []

    def close(self) -> None:
        """No step is under way."""
        self._doorbell.close()
        self.mailbox.close()
        self.slots.clear()

    def _refuse(self, slots: Sequence[int]) -> None:
        """In one new generation for all of them."""
        for slot in slots[1:]:
            self.mailbox.finish(slot)
        for slot in slots[:1]:
            self.mailbox.fail(slot)

    def _answer(self, slot: int, step: int, rows: int, rules_bytes: int) -> None:
        with self._changed:
            self._asked[slot] = (step, rows)
            self._changed.notify_all()
