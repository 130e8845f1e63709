"""Rows' sampling parameters as the C++ engine takes them, and what it reports of logprobs.

Pure translation: the rules themselves are in csrc/sampler.h.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dualpace.core.history import TokenCounts
from dualpace.core.logprobs import TokenLogprobs, asking_rows, unpack_logprobs
from dualpace.core.plan import BatchRow
from dualpace.cpu import _native

_NONE = TokenCounts(array("i"), array("i"))


def sampling_arrays(rows: Sequence[BatchRow]) -> _native.Sampling:
    """Raises `OverflowError` for a number that does not fit."""
    params = [row.params for row in rows]
    biases = [bias for each in params for _, bias in each.logit_bias]
    banned_offsets, banned = ragged([row.banned_ids for row in rows])
    bias_offsets, biased = ragged([[i for i, _ in each.logit_bias] for each in params])
    histories = [row.history or _NONE for row in rows]
    penalties = [
        (each.presence_penalty, each.frequency_penalty, each.repetition_penalty) for each in params
    ]
    return _native.Sampling(
        temperature=np.array([each.temperature for each in params], np.float64),
        top_k=np.array([each.top_k for each in params], np.int64),
        top_p=np.array([each.top_p for each in params], np.float64),
        min_p=np.array([each.min_p for each in params], np.float64),
        penalties=np.array(penalties, np.float64).reshape(len(rows), 3),
        seed=np.array([each.seed for each in params], np.uint64),
        banned_offsets=banned_offsets,
        banned=banned,
        bias_offsets=bias_offsets,
        biased=biased,
        biases=np.array(biases, np.float64),
        seen_offsets=_offsets([len(each.ids) for each in histories]),
        seen=_joined([each.ids for each in histories]),
        seen_counts=_joined([each.counts for each in histories]),
        wants_logprobs=np.array([each.logprobs is not None for each in params], np.bool_),
    )


def logprobs_buffer(rows: Sequence[BatchRow], vocab: int) -> NDArray[np.float64] | None:
    """Room for what the engine reports, if any row asks for it: [M, 2 + 2 n]."""
    asked = asking_rows(row.params.logprobs for row in rows)
    if not asked:
        return None
    width = min(max(count for _, count in asked), vocab)
    return np.empty((len(rows), 2 + 2 * width), np.float64)


def read_logprobs(
    rows: Sequence[BatchRow], buffer: NDArray[np.float64] | None
) -> dict[int, TokenLogprobs]:
    """What has been written into `logprobs_buffer`, by row."""
    if buffer is None:
        return {}
    asked = asking_rows(row.params.logprobs for row in rows)
    return unpack_logprobs(asked, buffer[[index for index, _ in asked]].tolist())


def ragged(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Lists of ids as offsets [M + 1] and flat values. Raises `OverflowError`."""
    offsets = _offsets([len(each) for each in lists])
    return offsets, np.fromiter(chain.from_iterable(lists), np.int32, int(offsets[-1]))


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _joined(parts: Sequence[array[int]]) -> NDArray[np.int32]:
    """The parts end to end, without making a Python object of each number."""
    return np.concatenate([np.empty(0, np.int32), *parts])
