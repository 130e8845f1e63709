"""What the server asks of a tokenizer, and nothing about where one comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Calls may come from two threads, never two `encode`s at once."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without clean-up; bytes that are no UTF-8 come out as U+FFFD."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. Raises if it cannot be told."""
        ...
