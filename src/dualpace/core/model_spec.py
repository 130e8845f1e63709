"""The shape of a model: what kernels, pools and the cost model need to know. No weights."""

from __future__ import annotations

import msgspec


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3).

    `inv_freq` has head_dim / 2 rotary frequencies in radians per position, any scaling rule of the
    checkpoint already applied; the rotation pairs dimension i with i + head_dim / 2.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    tie_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    eos_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        layer = (
            self.hidden_size * (self.q_size * 2 + self.kv_size * 2)
            + 3 * self.hidden_size * self.intermediate_size
            + 2 * self.hidden_size
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def page_bytes(self, page_tokens: int, element_bytes: int) -> int:
        """Bytes of one KV page over all layers: [layer][2][kv_head][page_tokens][head_dim]."""
        return self.num_layers * 2 * self.kv_size * page_tokens * element_bytes
