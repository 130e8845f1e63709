"""`StepModel` on plain torch: any device and dtype. The slow twin of what runs on CUDA."""

from __future__ import annotations

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
        arrays = upload(
            {
                "tokens": step.tokens,
                "sources": step.sources,
                "positions": step.positions,
                "sampled": step.sampled_tokens,
            },
            self._weights.device,
        )
        tokens = with_previous(arrays["tokens"], arrays["sources"], previous)
        self._attention.plan(step.spans)
        hidden = reference.forward(
            self._weights, self._spec, tokens, arrays["positions"], self._attention.run
        )
        sampled = hidden[arrays["sampled"]]
        return torch.nn.functional.linear(sampled, self._weights.lm_head)


def with_previous(tokens: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    """`tokens` [N], those with a source in place of which `previous` has what was sampled."""
    return torch.where(sources >= 0, previous[sources.clamp(min=0)], tokens)
