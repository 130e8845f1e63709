"""Text to token ids and back, and chat templates, through transformers.

The only module of the frontend that may pull in torch: transformers' tokenizers do so by
themselves. Knows nothing of requests or streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dualpace.core.errors import ModelError, RequestError
from dualpace.models.registry import ModelSource, require_tokenizer
from dualpace.models.token_bytes import TokenBytes


class Tokenizer:
    """A tokenizer with its chat template."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._token_bytes: Callable[[int], bytes] | None = None
        if backend.is_fast:
            self._token_bytes = TokenBytes(backend.backend_tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; an incomplete UTF-8 sequence at the end reads as U+FFFD."""
        return str(
            self._backend.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, exact where transformers has its vocabulary at hand."""
        if self._token_bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self._token_bytes(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation.

        Raises `RequestError` where the model has no template, or its template refuses `messages`.
        """
        if self._backend.chat_template is None:
            raise RequestError(
                "this model has no chat template: use the completions API", param="messages"
            )
        try:
            text = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        # The template writes the special tokens itself.
        return self.encode(str(text), add_special_tokens=False)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises `ModelError` where it has none that can be read."""
    require_tokenizer(source)
    try:
        if source.kind == "gguf":
            # Not AutoTokenizer: that parses the whole file a second time to find the config.
            return Tokenizer(
                PreTrainedTokenizerFast.from_pretrained(
                    str(source.path.parent), gguf_file=source.path.name, local_files_only=True
                )
            )
        return Tokenizer(AutoTokenizer.from_pretrained(str(source.path), local_files_only=True))
    # transformers raises nearly anything for a damaged file, and each means the same here.
    except Exception as error:
        raise ModelError(
            f"{source.path}: no usable tokenizer ({type(error).__name__}: {error}); "
            "--tokenizer names another place"
        ) from error
