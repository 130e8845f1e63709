"""A `Batch` as flat arrays: what a step's forward pass, attention and sampler read.

Pure translation on the host; chooses nothing, touches no pool and no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dualpace.core.errors import EngineError
from dualpace.core.plan import PENDING, Batch, BatchRow, Tier

IntArray = npt.NDArray[np.int64]


class Span(msgspec.Struct, frozen=True):
    """One row's place in the flat token dimension, and the pages of its context.

    Tokens `first` … `first + count - 1` of the step are at positions `start` … `end - 1`; the pages
    hold positions from `base` on, `far` those before.
    """

    first: int
    count: int
    start: int
    pages: list[int]
    tier: Tier
    far: Sequence[int] = ()  # pages of the host
    base: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class StepInput:
    """A flattened batch. N tokens, R rows of which S sample.

    The rows are those of the batch in another order: first the decodes with KV on the GPU, then its
    chunks of prompts, then what has its KV on the host, last the gated rows, so that each kind is
    one run of tokens.
    """

    rows: list[BatchRow]
    order: list[int]  # place in the batch of each row
    spans: list[Span]  # of each row
    tokens: IntArray  # [N], 0 where a token is not known to the host
    sources: IntArray  # [N], the row of the step before that sampled the token, or -1
    positions: IntArray  # [N]
    sampled_rows: IntArray  # [S]
    sampled_tokens: IntArray  # [S], last token of each sampled row

    @property
    def num_decodes(self) -> int:
        """Rows, and tokens, of the first kind."""
        return sum(span.count == 1 and span.tier == "gpu" and not span.base for span in self.spans)

    @property
    def num_gated(self) -> int:
        """Rows, and tokens, of the last kind."""
        return sum(row.gated for row in self.rows)


def flatten(
    batch: Batch,
    page_tokens: int,
    previous: Mapping[str, int],
    far: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> StepInput:
    """Lay the rows end to end.

    far: of requests whose pages do not begin at position 0, the host's pages that come before;
    previous: row of each request in the step launched before. A pending token that is not there is
    of a step that failed: any token will do, since nobody looks at what follows it. Raises
    `EngineError` for a row whose pages cannot hold it.
    """
    kinds = [_kind(row, far) for row in batch.rows]
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    rows = [batch.rows[index] for index in order]
    spans: list[Span] = []
    tokens: list[int] = []
    pending: dict[int, int] = {}  # source of each pending token
    for row in rows:
        first, count = len(tokens), len(row.tokens)
        before = far.get(row.request_id, ()) if far else ()
        base = len(before) * page_tokens
        if count == 0 or len(row.pages) * page_tokens < row.start + count - base:
            raise EngineError(
                f"request {row.request_id}: {count} tokens up to position {row.end} "
                f"in {len(row.pages)} pages of {page_tokens} from position {base} on"
            )
        if row.tokens[0] == PENDING:
            pending[first] = previous.get(row.request_id, 0)
            tokens.append(0)
        else:
            tokens += row.tokens
        spans.append(Span(first, count, row.start, row.pages, row.tier, before, base))
    sources = np.full(len(tokens), -1, dtype=np.int64)
    sources[list(pending)] = list(pending.values())
    first_positions = _array([span.start - span.first for span in spans])
    counts = _array([span.count for span in spans])
    sampled = [index for index, row in enumerate(rows) if row.sample]
    last = [spans[index].first + spans[index].count - 1 for index in sampled]
    return StepInput(
        rows=rows,
        order=order,
        spans=spans,
        tokens=_array(tokens),
        sources=sources,
        positions=np.arange(len(tokens)) + np.repeat(first_positions, counts),
        sampled_rows=_array(sampled),
        sampled_tokens=_array(last),
    )


def end_to_end(first: StepInput, second: StepInput) -> StepInput:
    """Both halves of a step as one, rows and tokens of the second behind those of the first."""
    rows, tokens = len(first.rows), len(first.tokens)
    return StepInput(
        rows=first.rows + second.rows,
        order=first.order + [rows + place for place in second.order],
        spans=first.spans
        + [msgspec.structs.replace(span, first=tokens + span.first) for span in second.spans],
        tokens=np.concatenate((first.tokens, second.tokens)),
        sources=np.concatenate((first.sources, second.sources)),
        positions=np.concatenate((first.positions, second.positions)),
        sampled_rows=np.concatenate((first.sampled_rows, rows + second.sampled_rows)),
        sampled_tokens=np.concatenate((first.sampled_tokens, tokens + second.sampled_tokens)),
    )


def _kind(row: BatchRow, far: Mapping[str, Sequence[int]]) -> int:
    if row.gated:
        return 3
    if row.tier == "host":
        return 2
    return 0 if len(row.tokens) == 1 and row.request_id not in far else 1


def _array(values: Sequence[Any]) -> IntArray:
    return np.asarray(values, dtype=np.int64)
