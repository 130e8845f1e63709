"""Iterations whose dense part the GPU engine computes, of one model through one mailbox.

Splits rows into micro-batches and puts the results together again; the turns that the engines take
are csrc/assist_program.h's. Does not know weights, and does not choose the route.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dualpace.assist.mailbox import SLOTS, Mailbox
from dualpace.assist.rules import encode_rules
from dualpace.core.errors import AssistError
from dualpace.core.logprobs import TokenLogprobs, asking_rows, unpack_logprobs
from dualpace.core.plan import BatchRow
from dualpace.cpu import _native
from dualpace.cpu.sampling import ragged


class AssistedDecoder:
    """Runs one iteration at a time; `mailbox` is the CPU's end."""

    def __init__(self, native: _native.Model, mailbox: Mailbox, vocab: int) -> None:
        self._native = native
        self._mailbox = mailbox
        self._vocab = vocab
        self._iterations = 0

    def decode(
        self, rows: Sequence[BatchRow], arena: _native.Memory, page_tokens: int, slots: int
    ) -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
        """One new token per row, [M], and the logprobs of the rows that asked. Releases the GIL.

        slots: 1, or 2 for two micro-batches of which one is attended to while the GPU computes the
        other. Raises `AssistError` where the GPU engine does not do its part: then nothing counts,
        and the rows may be run again as they are. Raises `ValueError` as `CpuModel.decode` does,
        and for more rows than the mailbox takes.
        """
        self._iterations += 1
        return self._run(
            self._iterations, split_rows(rows, min(slots, SLOTS)), rows, arena, page_tokens
        )

    def attend(
        self,
        step: int,
        halves: Sequence[Sequence[BatchRow]],
        arena: _native.Memory,
        page_tokens: int,
    ) -> None:
        """Do this engine's part of the GPU engine's step of that number, each half in a slot.

        Writes the rows' KV to their pages; what they sample is for the GPU engine. Errors as of
        `decode`.
        """
        rows = [row for half in halves for row in half]
        ends = list(accumulate(len(half) for half in halves))
        parts = [range(end - len(half), end) for end, half in zip(ends, halves, strict=True)]
        self._run(step, parts, rows, arena, page_tokens)

    def _run(
        self,
        number: int,
        parts: Sequence[Sequence[int]],
        rows: Sequence[BatchRow],
        arena: _native.Memory,
        page_tokens: int,
    ) -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
        """parts: indices of each slot's rows."""
        order = [index for part in parts for index in part]
        ordered = [rows[index] for index in order]
        page_offsets, pages = ragged([row.pages for row in ordered])
        out = np.empty(len(rows), np.int32)
        outcome = self._native.decode_assisted(
            self._mailbox,
            number,
            [len(part) for part in parts],
            [encode_rules([rows[index] for index in part]) for part in parts],
            arena,
            page_tokens,
            np.array([row.tokens[-1] for row in ordered], np.int32),
            np.array([row.start for row in ordered], np.int64),
            page_offsets,
            pages,
            np.array([row.params.temperature for row in ordered], np.float64),
            np.array([row.params.seed for row in ordered], np.uint64),
            out,
        )
        if outcome != "ready":
            raise AssistError(f"assisted iteration {number}: {_REASONS[outcome]}")
        tokens = np.empty_like(out)
        tokens[order] = out
        logprobs: dict[int, TokenLogprobs] = {}
        for slot, part in enumerate(parts):
            logprobs |= self._logprobs(slot, part, rows)
        return tokens, logprobs

    def _logprobs(
        self, slot: int, part: Sequence[int], rows: Sequence[BatchRow]
    ) -> dict[int, TokenLogprobs]:
        asked = asking_rows(rows[index].params.logprobs for index in part)
        if not asked:
            return {}
        width = 2 + 2 * min(max(count for _, count in asked), self._vocab)
        packed = self._mailbox.area(slot, "logprobs").view(np.float64)[: len(asked) * width]
        by_place = unpack_logprobs(asked, packed.reshape(-1, width).tolist())
        return {part[place]: told for place, told in by_place.items()}


_REASONS = {
    "timed out": "the GPU engine took too long",
    "peer gone": "the GPU engine is gone",
    "cancelled": "the GPU engine gave it up",
}


def split_rows(rows: Sequence[BatchRow], parts: int) -> list[list[int]]:
    """Indices of `rows` in up to `parts` lists, none of them empty, whose contexts add up to about
    the same number of tokens. The longest row comes first, each goes where there is least."""
    lists: list[list[int]] = [[] for _ in range(min(parts, len(rows)))]
    totals = [0] * len(lists)
    for index in sorted(range(len(rows)), key=lambda index: -rows[index].end):
        least = totals.index(min(totals))
        lists[least].append(index)
        totals[least] += rows[index].end
    return lists
