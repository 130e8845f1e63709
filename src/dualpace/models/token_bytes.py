"""The bytes of single tokens, from the vocabulary itself.

`decode` of one id does not tell them: a byte-level token may be half a character, and the decoder
of a SentencePiece vocabulary drops a leading space.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's


class TokenBytes:
    """Bytes by id, for vocabularies of the byte-level and the SentencePiece kind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._byte_of: dict[str, int] | None = None
        if "ByteLevel" in repr(tokenizer.decoder):
            self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the vocabulary lacks, as rows that pad the model's do."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[letter] for letter in token)
        byte = _BYTE.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return str(token).replace(_SPACE, " ").encode()
