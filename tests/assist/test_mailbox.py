"""The mailbox's turns, one by one, with both ends in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from dualpace.assist.mailbox import SLOTS, Doorbell, Layout, Mailbox, create_mailbox, open_mailbox
from dualpace.assist.rules import decode_rules, encode_rules, rules_bytes
from dualpace.core.history import TokenHistory
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams

LAYOUT = Layout(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, element_bytes=2, max_rows=6,
    rules_bytes=100,
)  # fmt: skip


@pytest.fixture
def ends() -> Iterator[tuple[Mailbox, Mailbox, int]]:
    descriptor = create_mailbox(LAYOUT)
    cpu = open_mailbox(descriptor, LAYOUT, "cpu", patience=0.2)
    gpu = open_mailbox(descriptor, LAYOUT, "gpu", patience=0.2)
    yield cpu, gpu, descriptor
    cpu.close()
    gpu.close()
    os.close(descriptor)


class Bell:
    """A doorbell that remembers who rang."""

    def __init__(self, gpu: Mailbox) -> None:
        self.heard: list[tuple[int, int, int, int]] = []
        self.rang = threading.Semaphore(0)
        self.doorbell = Doorbell(gpu, self.answer)

    def answer(self, *asked: int) -> None:
        self.heard.append(asked)
        self.rang.release()


def test_both_sides_see_the_same_bytes_at_the_offsets_that_the_layout_tells(
    ends: tuple[Mailbox, Mailbox, int],
) -> None:
    cpu, gpu, descriptor = ends
    for slot in range(SLOTS):
        qkv = gpu.area(slot, "qkv").view(np.uint16).reshape(6, 4 + 2 * 2, 8)
        qkv[5, 7] = np.arange(8) + slot
        offset, size = LAYOUT.area(slot, "qkv")
        there = np.frombuffer(os.pread(descriptor, size, offset), np.uint16)
        assert there[-8:].tolist() == list(range(slot, slot + 8))
        assert (cpu.area(slot, "qkv") == gpu.area(slot, "qkv")).all()
        assert offset + size <= LAYOUT.device_bytes < LAYOUT.area(0, "rules")[0] + 1
    assert cpu.begin() == "ready"
    cpu.submit(1, 1, 1, b"")
    cpu.post_go(1, 1)
    gpu.post_done(1, 2)
    for word in (LAYOUT.go(1, 1), LAYOUT.done(1, 2)):
        assert os.pread(descriptor, 4, word) == b"\1\0\0\0"
    assert os.pread(descriptor, 4, LAYOUT.go(0, 1)) == b"\0\0\0\0"


def test_a_request_is_heard_once_however_often_the_bell_rings(
    ends: tuple[Mailbox, Mailbox, int],
) -> None:
    cpu, gpu, _ = ends
    bell = Bell(gpu)
    assert cpu.begin() == "ready"
    cpu.submit(1, 77, 3, b"rules")
    for _ in range(5):
        cpu.ring()
    assert bell.rang.acquire(timeout=5)
    assert not bell.rang.acquire(timeout=0.05)
    assert bell.heard == [(1, 77, 3, 5)]
    assert gpu.area(1, "rules")[:5].tobytes() == b"rules"
    gpu.finish(1)
    assert cpu.begin() == "ready"
    cpu.submit(1, 78, 1, b"")
    cpu.ring()
    assert bell.rang.acquire(timeout=5)
    assert bell.heard[1:] == [(1, 78, 1, 0)]
    bell.doorbell.close()


def test_what_was_asked_of_an_older_generation_is_dropped(
    ends: tuple[Mailbox, Mailbox, int],
) -> None:
    cpu, gpu, descriptor = ends
    assert cpu.begin() == "ready"
    cpu.submit(0, 1, 1, b"")
    gpu.close()
    newer = open_mailbox(descriptor, LAYOUT, "gpu", patience=0.2)
    bell = Bell(newer)
    cpu.ring()
    assert not bell.rang.acquire(timeout=0.05)
    assert cpu.wait_done(0, 0) == "cancelled"
    assert cpu.begin() == "ready"
    cpu.submit(0, 2, 1, b"")
    cpu.ring()
    assert bell.rang.acquire(timeout=5)
    assert bell.heard == [(0, 2, 1, 0)]
    bell.doorbell.close()
    newer.close()


def test_a_slot_is_not_asked_again_before_it_is_let_go_and_then_it_is_clean(
    ends: tuple[Mailbox, Mailbox, int],
) -> None:
    cpu, gpu, _ = ends
    bell = Bell(gpu)
    assert cpu.begin() == "ready"
    cpu.submit(0, 1, 1, b"")
    cpu.ring()
    assert bell.rang.acquire(timeout=5)
    gpu.post_done(0, 0)
    cpu.post_go(0, 0)
    assert cpu.wait_done(0, 1) == "timed out"
    cpu.cancel(0)
    assert cpu.begin() == "timed out"
    assert gpu.wait_go(0, 0) == "ready"  # what was there before still counts
    assert gpu.wait_go(0, 1) == "cancelled"
    gpu.post_done(0, 1)
    gpu.fail(0)
    assert cpu.begin() == "ready"
    cpu.submit(0, 2, 1, b"")
    assert cpu.wait_done(0, 0) == "timed out"
    assert cpu.wait_done(0, 1) == "timed out"
    bell.doorbell.close()


def test_rules_of_special_rows_arrive_whole_and_fit() -> None:
    plain = DecodeParams(temperature=0.7, seed=9)
    penal = DecodeParams(repetition_penalty=1.3, logit_bias=tuple((i, 1.5) for i in range(300)))
    history = TokenHistory().counts(list(range(1000)), [3, 3, 5])
    rows = [
        BatchRow("a", [1], 0, [0], "host", True, plain),
        BatchRow("b", [1], 0, [0], "host", True, penal, history=history),
        BatchRow("c", [1], 0, [0], "host", True, plain, banned_ids=(7, 8)),
    ]
    encoded = encode_rules(rows)
    assert len(encoded) <= rules_bytes(2, 1000)
    assert encode_rules(rows[:1]) == b""
    first, second = decode_rules(encoded)
    assert (first.index, first.params, first.history) == (1, penal, history)
    assert (second.index, second.banned_ids, second.history) == (2, (7, 8), None)
