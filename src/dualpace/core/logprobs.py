"""Log-probabilities of a sampled token and of the likeliest ones, as they travel to the client.

They are those of the model's own distribution: before temperature, penalties, biases and filters.
Knows nothing of vocabularies or text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

MAX_LOGPROBS = 20  # likeliest tokens that a request may ask for


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one sampled token.

    rank: 1 + the number of ids that are likelier; top_ids, top_logprobs: as many of the likeliest
    as the request asked for, the likeliest first, the lower id first among equals.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def asking_rows(counts: Iterable[int | None]) -> list[tuple[int, int]]:
    """Index and number of likeliest tokens of each row that asks, given every row's `logprobs`."""
    return [(row, count) for row, count in enumerate(counts) if count is not None]


def unpack_logprobs(
    rows: Iterable[tuple[int, int]], packed: Iterable[Sequence[float]]
) -> dict[int, TokenLogprobs]:
    """Both samplers' output, by row.

    rows: of `asking_rows`; packed: for each of them logprob, rank, then `width` ids, then `width`
    logprobs, where `width` may be more than it asked for.
    """
    unpacked = {}
    for (row, count), values in zip(rows, packed, strict=True):
        width = (len(values) - 2) // 2
        unpacked[row] = TokenLogprobs(
            logprob=values[0],
            rank=int(values[1]),
            top_ids=[int(token_id) for token_id in values[2 : 2 + count]],
            top_logprobs=list(values[2 + width : 2 + width + count]),
        )
    return unpacked
