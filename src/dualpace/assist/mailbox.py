"""The mailbox of GPU Dense Assist: the memory in which the engines take turns layer by layer.

Its layout and protocol are csrc/mailbox_layout.h and csrc/mailbox.h; this is what a model's shape
makes of them. Knows no torch, no weights and nothing of how either side computes.
"""

from __future__ import annotations

import mmap
import os

from dualpace.assist import _mailbox
from dualpace.assist.rules import rules_bytes
from dualpace.core.config import DType
from dualpace.core.model_spec import ModelSpec

Layout = _mailbox.Layout
Mailbox = _mailbox.Mailbox
Doorbell = _mailbox.Doorbell

SLOTS = _mailbox.SLOTS
PATIENCE = 30.0  # seconds of any one wait for a peer that lives
SILENCE = 5.0  # seconds between two signs of life of the peer


def mailbox_layout(spec: ModelSpec, dtype: DType, max_rows: int, max_model_len: int) -> Layout:
    """Of a mailbox whose slots take up to `max_rows` rows, activations staged as `dtype`."""
    return _mailbox.Layout(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        element_bytes=2 if dtype == "bfloat16" else 4,
        max_rows=max_rows,
        rules_bytes=rules_bytes(max_rows, min(max_model_len, spec.vocab_size)),
    )


def create_mailbox(layout: Layout) -> int:
    """A memfd for it, which takes memory only where it is written; children may inherit it."""
    descriptor = os.memfd_create("dualpace-mailbox", 0)
    os.ftruncate(descriptor, layout.bytes)
    return descriptor


def open_mailbox(
    descriptor: int,
    layout: Layout,
    side: _mailbox.Side,
    *,
    patience: float = PATIENCE,
    silence: float = SILENCE,
) -> Mailbox:
    """One engine's end of it. At most one of each side may be open at a time."""
    memory = mmap.mmap(descriptor, layout.bytes)
    return _mailbox.Mailbox(memory, layout, side, patience, silence)
