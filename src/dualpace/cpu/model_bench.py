"""A whole iteration of a Llama-3.1-8B-shaped model on the host: weights of no meaning, real sizes.

Knows the shape of the model and how to fill it fast; does not know what its time is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.cpu.model import CpuModel
from dualpace.kv.pages import pages_for

HEAD_DIM = 128
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    inv_freq=tuple(500000.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)),
    tie_embeddings=False,
)
PAGE_TOKENS = 32


class ModelBench:
    """The model, loaded, and a batch of `rows` requests of `tokens` tokens each, in bfloat16.

    arena: `kv_bytes(spec)` of shared memory, or more; the pages lie in it in random order.
    """

    rows = 32
    tokens = 1024

    def __init__(
        self, spec: ModelSpec, cores: Sequence[int], isa: str, arena: NDArray[np.uint8]
    ) -> None:
        self._spec = spec
        self._model = CpuModel(
            spec, _repeated_weights(spec), dtype="bfloat16", cores=cores, isa=isa
        )
        self._arena = arena
        per_row = pages_for(self.tokens, PAGE_TOKENS)
        pages = np.random.default_rng(0).permutation(self.rows * per_row).reshape(self.rows, -1)
        self._batch = [
            BatchRow(
                request_id=f"row-{i}",
                tokens=[i],
                start=self.tokens - 1,
                pages=pages[i].tolist(),
                tier="host",
                sample=True,
                params=DecodeParams(),
            )
            for i in range(self.rows)
        ]

    @classmethod
    def kv_bytes(cls, spec: ModelSpec) -> int:
        """Bytes of KV that an iteration reads."""
        return cls.rows * pages_for(cls.tokens, PAGE_TOKENS) * spec.page_bytes(PAGE_TOKENS, 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that an iteration reads: all but the embedding's other rows."""
        embedding = self._spec.vocab_size * self._spec.hidden_size
        return (self._spec.num_parameters - embedding) * 2

    def iterate(self) -> float:
        """Seconds of one iteration, from rows to token ids."""
        start = time.perf_counter()
        self._model.decode(self._batch, self._arena, PAGE_TOKENS)
        return time.perf_counter() - start


def _repeated_weights(spec: ModelSpec) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every tensor from the same block of normal numbers: drawing 8 billion would take minutes."""
    block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)
    stored = block.astype(ml_dtypes.bfloat16)
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def matrix(rows: int, columns: int) -> NDArray[Any]:
        return np.resize(stored, (rows, columns))

    norm = np.ones(hidden, np.float32)
    layer = {
        "input_norm": norm,
        "q_proj": matrix(spec.q_size, hidden),
        "k_proj": matrix(spec.kv_size, hidden),
        "v_proj": matrix(spec.kv_size, hidden),
        "o_proj": matrix(hidden, spec.q_size),
        "post_norm": norm,
        "gate_proj": matrix(inner, hidden),
        "up_proj": matrix(inner, hidden),
        "down_proj": matrix(hidden, inner),
    }
    for index in range(spec.num_layers):
        for name, array in layer.items():
            yield f"layers.{index}.{name}", array
    yield "norm", norm
    for name in ("embed_tokens", "lm_head"):
        yield name, matrix(spec.vocab_size, hidden)
