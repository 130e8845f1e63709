"""A `Batch` as flat tensors: what a step's forward pass, attention and sampler read.

Pure translation; chooses nothing and touches no pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.core.errors import EngineError
from dualpace.core.plan import Batch, Tier


@dataclass(frozen=True)
class Span:
    """One row's place in the flat token dimension, and the pages of its context.

    Tokens `first` … `first + count - 1` of the step are at positions `start` … `end - 1`.
    """

    first: int
    count: int
    start: int
    pages: list[int]
    tier: Tier

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class StepInput:
    """Flattened batch; tensors on the device of the model."""

    tokens: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    spans: list[Span]
    sampled_rows: list[int]  # indices into batch.rows
    sampled_tokens: Tensor  # int64 [R]: last token of each sampled row


def flatten(batch: Batch, page_tokens: int, device: torch.device) -> StepInput:
    """Lay the rows end to end. Raises `EngineError` for a row whose pages cannot hold it."""
    spans: list[Span] = []
    tokens = np.empty(batch.num_tokens, dtype=np.int64)
    positions = np.empty(batch.num_tokens, dtype=np.int64)
    first = 0
    for row in batch.rows:
        count = len(row.tokens)
        if count == 0 or len(row.pages) * page_tokens < row.end:
            raise EngineError(
                f"request {row.request_id}: {count} tokens up to position {row.end} "
                f"in {len(row.pages)} pages of {page_tokens}"
            )
        tokens[first : first + count] = row.tokens
        positions[first : first + count] = np.arange(row.start, row.end)
        spans.append(Span(first, count, row.start, row.pages, row.tier))
        first += count
    sampled_rows = [index for index, row in enumerate(batch.rows) if row.sample]
    last = [spans[index].first + spans[index].count - 1 for index in sampled_rows]
    return StepInput(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        spans=spans,
        sampled_rows=sampled_rows,
        sampled_tokens=torch.tensor(last, dtype=torch.int64, device=device),
    )
