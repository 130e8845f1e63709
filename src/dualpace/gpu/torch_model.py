"""`StepModel` on plain torch: any device and dtype. The slow twin of what runs on CUDA."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualpace.core.model_spec import ModelSpec
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.step_input import StepInput
from dualpace.gpu.torch_attention import TorchAttention
from dualpace.gpu.upload import upload
from dualpace.models import reference
from dualpace.models.torch_weights import Weights


class TorchModel:
    """The reference forward pass with paged attention."""

    def __init__(self, weights: Weights, spec: ModelSpec, pools: KVPools) -> None:
        self._weights = weights
        self._spec = spec
        self._attention = TorchAttention(pools, spec.group_size, weights.device)

    def forward(self, step: StepInput, previous: Tensor) -> Tensor:
        tokens = upload_tokens(step, previous, self._weights.device)
        self._attention.plan(step.spans)
        hidden = reference.forward(
            self._weights, self._spec, tokens.ids, tokens.positions, self._attention.run
        )
        return torch.nn.functional.linear(hidden[tokens.sampled], self._weights.lm_head)


class StepTokens(NamedTuple):
    """Of a step's N tokens, on the device."""

    ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    sampled: Tensor  # int64 [S], last token of each sampled row


def upload_tokens(step: StepInput, previous: Tensor, device: torch.device) -> StepTokens:
    """previous: tokens by row of the step before."""
    arrays = upload(
        {
            "tokens": step.tokens,
            "sources": step.sources,
            "positions": step.positions,
            "sampled": step.sampled_tokens,
        },
        device,
    )
    ids = with_previous(arrays["tokens"], arrays["sources"], previous)
    return StepTokens(ids, arrays["positions"], arrays["sampled"])


def with_previous(tokens: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    """`tokens` [N], those with a source in place of which `previous` has what was sampled."""
    return torch.where(sources >= 0, previous[sources.clamp(min=0)], tokens)
