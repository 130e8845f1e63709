"""Drawing a step's tokens: rows without special rules by one kernel, the others by `sampler`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualpace.core.logprobs import asking_rows
from dualpace.core.plan import PENDING, BatchRow
from dualpace.gpu.sampler import SampleRow, sample
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.upload import upload


def draw_arrays(rows: Sequence[BatchRow]) -> dict[str, npt.NDArray[np.generic]]:
    """What the drawing kernel reads of each row: temperatures float64, seeds int64."""
    seeds = np.array([row.params.seed for row in rows], dtype=np.uint64)
    return {
        "temperatures": np.array([row.params.temperature for row in rows], dtype=np.float64),
        "seeds": seeds.view(np.int64),
    }


def draw_plain(step: StepInput, logits: Tensor, sampled: Tensor) -> None:
    """Draw the token of every sampling row as if it had no special rules.

    logits: [S, V] on CUDA; sampled: int64, by row of the step, is filled.
    """
    from dualpace.gpu.triton_kernels import draw

    rows = [step.rows[index] for index in step.sampled_rows]
    arrays = upload(
        {
            **draw_arrays(rows),
            "positions": np.array([row.end for row in rows], dtype=np.int64),
            "rows": step.sampled_rows,
        },
        logits.device,
    )
    rules = (arrays["temperatures"], arrays["seeds"], arrays["positions"])
    draw(logits, *rules, sampled, places=arrays["rows"])


@dataclass(frozen=True)
class PackedLogprobs:
    """rows: row of the step and number of likeliest tokens of each row that asked; packed: float64
    [L, 2 + 2 n], as `core.logprobs.unpack_logprobs` reads it."""

    rows: list[tuple[int, int]]
    packed: Tensor


def previous_tokens(step: StepInput, sampled: Tensor) -> Tensor | None:
    """A copy of what the step before has sampled, by its rows, if penalties will ask for it: where
    the host does not know a row's last token, the row's history lacks it."""
    asked = any(row.history is not None and row.tokens[0] == PENDING for row in step.rows)
    return sampled.clone() if asked else None


def draw_special(
    step: StepInput,
    logits: Tensor,
    previous: Tensor | None,
    sampled: Tensor,
    *,
    everyone: bool = False,
) -> PackedLogprobs | None:
    """Draw the tokens of the rows that have special rules, or (`everyone`) of all that sample.

    previous: of `previous_tokens`, before the step. Returns the logprobs that were asked for.
    """
    places = [
        place
        for place, index in enumerate(step.sampled_rows)
        if everyone or step.rows[index].is_special
    ]
    if not places:
        return None
    rows = [step.rows[step.sampled_rows[place]] for place in places]
    arrays = upload(
        {
            "places": np.array(places),
            "rows": step.sampled_rows[places],
            "sources": step.sources[step.sampled_tokens[places]],
        },
        logits.device,
    )
    pending = None
    if previous is not None:
        sources = arrays["sources"]
        pending = torch.where(sources >= 0, previous[sources.clamp(min=0)], -1)
    drawn = sample(
        logits[arrays["places"]].float(),
        [SampleRow(row.params, row.end, row.banned_ids, row.history) for row in rows],
        pending,
    )
    sampled[arrays["rows"]] = drawn.tokens
    if drawn.logprobs is None:
        return None
    asked = [
        (int(step.sampled_rows[places[index]]), count)
        for index, count in asking_rows(row.params.logprobs for row in rows)
    ]
    return PackedLogprobs(asked, drawn.logprobs)
