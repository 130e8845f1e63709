"""A forward pass as the runner sees it. Implementations differ in the library they stand on, never
in what they compute.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dualpace.gpu.step_input import StepInput


class StepModel(Protocol):
    """Embedding to last hidden state over the pages of both pools. Not for two threads at once."""

    def forward(self, step: StepInput, previous: Tensor) -> Tensor:
        """Write the KV of the step's tokens into their pages, attend, and project.

        previous: int64, tokens by row of the step before. A token at position p sees positions
        0 … p of its own request. Returns the logits of the sampled rows, [S, V] in the dtype of
        the weights. Raises `EngineError` for a page that does not exist.
        """
        ...
