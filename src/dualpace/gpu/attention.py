"""Paged attention as the GPU engine sees it: planned once for a step, run once for each layer.

Implementations differ in the library they stand on, never in what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dualpace.gpu.step_input import Span


class Attention(Protocol):
    """Causal grouped-query attention over the pages of both pools.

    Softmax scale is head_dim ** -0.5. Not for two threads at once.
    """

    def plan(self, spans: Sequence[Span]) -> None:
        """Take in a step's rows. Raises `EngineError` for a page that does not exist."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v into the layer's pages, then attend.

        q [N, heads, D], k and v [N, kv_heads, D], in the order of the planned spans. The token at
        position p sees positions 0 … p of its own request. Returns [N, heads, D].
        """
        ...
