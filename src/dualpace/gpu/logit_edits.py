"""What a request's rules change in its logits before anything is drawn: biases, bans, penalties.

In this order, each computed in double and rounded to the float that the next one reads:

    l_i + bias_i
    -inf where banned
    r_i - frequency_penalty n_i - (presence_penalty where n_i > 0), of the ids seen in the request
        r_i = l_i / repetition_penalty where l_i > 0, else l_i * repetition_penalty
        n_i: how often i is in the output

Only the ids concerned are touched, so that the cost does not depend on the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualpace.core.history import TokenCounts
from dualpace.core.sampling import DecodeParams

_NONE = TokenCounts(array("i"), array("i"))


class EditedRow(Protocol):
    """What this module reads of a row."""

    @property
    def params(self) -> DecodeParams: ...
    @property
    def banned_ids(self) -> Sequence[int]: ...
    @property
    def history(self) -> TokenCounts | None: ...


def edit_arrays(rows: Sequence[EditedRow]) -> dict[str, NDArray[Any]]:
    """The edits of `rows`, for `gpu.upload`; only those kinds that some row has."""
    arrays: dict[str, NDArray[Any]] = {}
    biases = [(row, *bias) for row, each in enumerate(rows) for bias in each.params.logit_bias]
    if biases:
        arrays["bias_rows"] = np.array([row for row, _, _ in biases], np.int64)
        arrays["bias_ids"] = np.array([token_id for _, token_id, _ in biases], np.int64)
        arrays["biases"] = np.array([bias for _, _, bias in biases], np.float64)
    bans = [(row, token_id) for row, each in enumerate(rows) for token_id in each.banned_ids]
    if bans:
        arrays["bans"] = np.array(bans, np.int64).T.copy()
    penalized = [(row, each.params) for row, each in enumerate(rows) if each.params.penalizes]
    if penalized:
        histories = [rows[row].history or _NONE for row, _ in penalized]
        lengths = [len(history.ids) for history in histories]
        arrays["penalized_rows"] = np.array([row for row, _ in penalized], np.int64)
        arrays["penalties"] = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p in penalized],
            np.float64,
        )
        arrays["seen_places"] = np.repeat(np.arange(len(penalized), dtype=np.int32), lengths)
        arrays["seen_ids"] = np.concatenate([history.ids for history in histories])
        arrays["seen_counts"] = np.concatenate([history.counts for history in histories])
    return arrays


def edit_logits(logits: Tensor, edits: dict[str, Tensor], pending: Tensor | None) -> None:
    """Apply the uploaded `edit_arrays` to float32 logits [R, V] in place.

    pending: int64 [R], the token that each row has been given since its history was written down,
    or -1.
    """
    if "biases" in edits:
        where = (edits["bias_rows"], edits["bias_ids"])
        logits[where] = (logits[where].double() + edits["biases"]).float()
    if "bans" in edits:
        logits[edits["bans"].unbind()] = logits.new_full((), -torch.inf)
    if "penalties" in edits:
        _penalize(logits, edits, pending)


def _penalize(logits: Tensor, edits: dict[str, Tensor], pending: Tensor | None) -> None:
    rows, penalties = edits["penalized_rows"], edits["penalties"]
    places = edits["seen_places"].long()  # indices into `rows`
    ids = edits["seen_ids"].long()
    counts = edits["seen_counts"].double()
    if pending is not None:
        newest = pending[rows]
        again = (ids == newest[places]).double()
        newest_counts = torch.ones_like(penalties[:, 0]).index_add_(0, places, again * counts)
        counts = counts + again
        newest_where = (rows, newest.clamp(min=0))
        before = logits[newest_where]
        after = torch.where(newest < 0, before, _penalty(before, newest_counts, penalties))
    where = (rows[places], ids)
    seen = _penalty(logits[where], counts, penalties[places])
    if pending is not None:
        # First, because a row without one writes back id 0 as it was; where the newest is among
        # those seen before, both write the same.
        logits[newest_where] = after
    logits[where] = seen


def _penalty(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """logits float32 [E], counts float64 [E], penalties [E, 3]. Returns float32 [E]."""
    repetition, frequency, presence = penalties.unbind(-1)
    exact = logits.double()
    exact = torch.where(exact > 0, exact / repetition, exact * repetition)
    return (exact - frequency * counts - torch.where(counts > 0, presence, 0.0)).float()
