"""What lies between attentions as CUDA graphs, one a layer, for steps that are not all decodes.

Launching a prompt's chunk kernel by kernel keeps the host busy for longer than a small chunk keeps
the GPU. Attention stays outside the graphs: its shape is another in every step, and the layer's KV
may have to be moved there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualpace.gpu.cuda_layers import CudaLayers, Flow, TokenInputs
from dualpace.gpu.gate import capturing

# Tokens that graphs are captured for. Above, the GPU takes longer than the host, and padding costs.
SIZES = (*range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))


@dataclass(frozen=True)
class GraphPassage:
    """`LayerPassage` by graphs."""

    flow: Flow
    graphs: list[torch.cuda.CUDAGraph]  # one a layer
    hidden: Tensor  # [N, H]

    def leave(self, index: int) -> Tensor:
        """As `CudaLayers.leave`; what it returns is there after the last layer only."""
        self.graphs[index].replay()
        return self.hidden


class LayerGraphs:
    """Graphs for every size up to `most_tokens`. They run one at a time and share their memory."""

    def __init__(self, layers: CudaLayers, previous: Tensor, most_tokens: int) -> None:
        """previous: int64, tokens by row of the step before."""
        self._layers = layers
        self._previous = previous
        self._sizes = [size for size in SIZES if size <= most_tokens]
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        device = layers.weights.device
        most = self._sizes[-1] if self._sizes else 0
        self._inputs = TokenInputs(
            tokens=torch.zeros(most, dtype=torch.int64, device=device),
            sources=torch.full((most,), -1, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            pages=torch.full((most,), -1, dtype=torch.int32, device=device),
            offsets=torch.zeros(most, dtype=torch.int32, device=device),
        )
        self._flow = Flow.new(layers.spec, most, device)
        self._graphs: dict[int, tuple[list[torch.cuda.CUDAGraph], Tensor]] = {}
        with capturing("capturing the layers' graphs"):
            for size in self._sizes[::-1]:
                self._graphs[size] = self._capture(size)

    def takes(self, tokens: int) -> bool:
        """True if there are graphs for a step of so many tokens."""
        return bool(self._sizes) and tokens <= self._sizes[-1]

    def enter(self, inputs: TokenInputs) -> GraphPassage:
        """Begin the step. Its hidden states will be overwritten by the next one."""
        tokens = len(inputs.tokens)
        size = next(size for size in self._sizes if size >= tokens)
        for name in TokenInputs.__dataclass_fields__:
            getattr(self._inputs, name)[:tokens].copy_(getattr(inputs, name))
        self._inputs.pages[tokens:size].fill_(-1)
        self._inputs.sources[tokens:size].fill_(-1)
        flow = self._flow.first(tokens)
        graphs, hidden = self._graphs[size]
        graphs[0].replay()
        return GraphPassage(flow, graphs[1:], hidden[:tokens])

    def _capture(self, size: int) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        flow = self._flow.first(size)
        names = TokenInputs.__dataclass_fields__
        inputs = TokenInputs(*(getattr(self._inputs, name)[:size] for name in names))
        count = len(self._layers.weights.layers)
        self._stream.wait_stream(torch.cuda.current_stream())
        graphs = []
        with torch.cuda.stream(self._stream):
            self._layers.enter(inputs, self._previous, flow)
            for index in {0, count - 1}:  # kernels are compiled outside the capture
                self._layers.leave(index, inputs, flow)
            torch.cuda.synchronize()
            for index in range(-1, count):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                if index < 0:
                    self._layers.enter(inputs, self._previous, flow)
                    hidden = flow.residual
                else:
                    hidden = self._layers.leave(index, inputs, flow)
                graph.capture_end()
                graphs.append(graph)
        torch.cuda.current_stream().wait_stream(self._stream)
        return graphs, hidden
