"""What rows ask of the sampler beyond temperature and seed, as bytes in the mailbox.

Only rows with special rules are written down: the others are drawn from arrays that a device can
read by itself. Knows no tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from dualpace.core.history import TokenCounts
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams

_ROW_BYTES = 16 * 1024  # of a row's rules without its history: 300 biases, some hundred stop ids


class RowRules(msgspec.Struct, frozen=True, array_like=True):
    """The rules of the row at `index`. Ids and counts are int32, the history's."""

    index: int
    params: DecodeParams
    banned_ids: tuple[int, ...]
    ids: bytes
    counts: bytes

    @property
    def history(self) -> TokenCounts | None:
        if not self.ids:
            return None
        ids, counts = array("i"), array("i")
        ids.frombytes(self.ids)
        counts.frombytes(self.counts)
        return TokenCounts(ids, counts)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[RowRules])


def rules_bytes(max_rows: int, most_ids: int) -> int:
    """Room for the rules of as many rows, each of whose history has so many distinct ids."""
    return max_rows * (_ROW_BYTES + 8 * most_ids)


def encode_rules(rows: Sequence[BatchRow]) -> bytes:
    """The rules of those of `rows` that have special ones; empty if none has."""
    special = [_rules(index, row) for index, row in enumerate(rows) if row.is_special]
    return _encoder.encode(special) if special else b""


def decode_rules(encoded: bytes | memoryview) -> list[RowRules]:
    """What `encode_rules` was given, of the special rows."""
    return _decoder.decode(encoded) if len(encoded) else []


def _rules(index: int, row: BatchRow) -> RowRules:
    ids, counts = row.history or (array("i"), array("i"))
    return RowRules(index, row.params, row.banned_ids, ids.tobytes(), counts.tobytes())
