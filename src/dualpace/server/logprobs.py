"""Log-probabilities as the OpenAI API writes them: ids become texts and bytes.

Knows both endpoints' forms and nothing of requests.
"""

from __future__ import annotations

import codecs

from dualpace.core.logprobs import TokenLogprobs
from dualpace.server.protocol import ChatLogprobs, CompletionLogprobs, LikelyToken, SampledToken
from dualpace.server.stream import Delta
from dualpace.server.tokenizer import Tokenizer

LEAST = -9999.0  # in place of minus infinity, for which JSON has no number


class TextOffsets:
    """Where in the text of one choice each token begins, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def push(self, token: bytes) -> int:
        """The offset of the next token."""
        offset = self._count
        self._count += len(self._decoder.decode(token))
        return offset


def completion_logprobs(
    tokenizer: Tokenizer, delta: Delta, offsets: TextOffsets
) -> CompletionLogprobs | None:
    """Of /v1/completions; None where none were asked for, or the delta has no token."""
    if not delta.logprobs:
        return None
    sampled = [tokenizer.token_bytes(token_id) for token_id in delta.token_ids]
    return CompletionLogprobs(
        text_offset=[offsets.push(token) for token in sampled],
        token_logprobs=[_finite(each.logprob) for each in delta.logprobs],
        tokens=[_name(token) for token in sampled],
        top_logprobs=[
            _by_name(tokenizer, token, each)
            for token, each in zip(sampled, delta.logprobs, strict=True)
        ],
    )


def _by_name(tokenizer: Tokenizer, sampled: bytes, each: TokenLogprobs) -> dict[str, float]:
    """The sampled token and the likeliest; of two that read the same, the likelier."""
    named = {_name(sampled): _finite(each.logprob)}
    for token_id, logprob in zip(each.top_ids, each.top_logprobs, strict=True):
        named.setdefault(_name(tokenizer.token_bytes(token_id)), _finite(logprob))
    return named


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> ChatLogprobs | None:
    """Of /v1/chat/completions; None where none were asked for, or the delta has no token."""
    if not delta.logprobs:
        return None
    content = []
    for token_id, each in zip(delta.token_ids, delta.logprobs, strict=True):
        sampled = _likely(tokenizer, token_id, each.logprob)
        top = [
            _likely(tokenizer, top_id, logprob)
            for top_id, logprob in zip(each.top_ids, each.top_logprobs, strict=True)
        ]
        content.append(
            SampledToken(
                token=sampled.token, logprob=sampled.logprob, bytes=sampled.bytes, top_logprobs=top
            )
        )
    return ChatLogprobs(content=content)


def _likely(tokenizer: Tokenizer, token_id: int, logprob: float) -> LikelyToken:
    token = tokenizer.token_bytes(token_id)
    return LikelyToken(
        token=token.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(token)
    )


def _name(token: bytes) -> str:
    """The token's text, or OpenAI's way to write one that is no text."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)
