"""What the server asks of a tokenizer, and one for servers that have none.

Knows nothing about where a tokenizer comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from dualpace.core.errors import RequestError

NO_TOKENIZER = (
    "this server runs without a tokenizer (--skip-tokenizer-init): prompts must be token ids, "
    "and there are no stop strings"
)


class Tokenizer(Protocol):
    """Text to ids and back. Calls may come from two threads, never two `encode`s at once."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without clean-up; bytes that are no UTF-8 come out as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token: not always whole characters. Empty for an id that it lacks."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. Raises if it cannot be told."""
        ...


class NoTokenizer:
    """Refuses text and makes none: for requests whose prompts are token ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise RequestError(NO_TOKENIZER, param="prompt")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """Its number, as vLLM writes tokens that it shall not decode."""
        return f"token_id:{token_id}".encode()

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise RequestError(NO_TOKENIZER, param="messages")
