"""Drawing a step's tokens: rows without special rules by one kernel, the others by `sampler`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualpace.core.plan import BatchRow
from dualpace.gpu.sampler import sample
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
    sampled[arrays["rows"]] = draw(
        logits, arrays["temperatures"], arrays["seeds"], arrays["positions"]
    )


def draw_special(
    step: StepInput, logits: Tensor, sampled: Tensor, *, everyone: bool = False
) -> None:
    """Draw the tokens of the rows that have special rules, or (`everyone`) of all that sample."""
    places = [
        place
        for place, index in enumerate(step.sampled_rows)
        if everyone or is_special(step.rows[index])
    ]
    if not places:
        return
    rows = [step.rows[step.sampled_rows[place]] for place in places]
    arrays = upload({"places": np.array(places), "rows": step.sampled_rows[places]}, logits.device)
    sampled[arrays["rows"]] = sample(
        logits[arrays["places"]].float(),
        [row.params for row in rows],
        [row.end for row in rows],
        [row.banned_ids for row in rows],
    )


def is_special(row: BatchRow) -> bool:
    """True for a row that takes more than temperature and noise."""
    params = row.params
    return bool(row.banned_ids or params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
