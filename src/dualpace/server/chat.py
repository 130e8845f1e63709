"""POST /v1/chat/completions: the assistant's next message of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from dualpace.core.errors import RequestError
from dualpace.server.checks import check_text
from dualpace.server.logprobs import chat_logprobs
from dualpace.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    MessageDelta,
    Usage,
    parse_request,
)
from dualpace.server.serving import EventStream, Meter, Service, answer_whole
from dualpace.server.stream import Delta
from dualpace.server.tokenizer import Tokenizer


class ChatFormat:
    """Deltas as chat completion objects."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}
        self._begun: set[int] = set()  # choices whose first chunk, with the role, is out

    def chunk(self, delta: Delta, usage: Usage | None) -> ChatChunk:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice = ChatChunkChoice(
            index=delta.index,
            delta=MessageDelta(role="assistant" if first else None, content=delta.text),
            logprobs=chat_logprobs(self._tokenizer, delta),
            finish_reason=delta.finish_reason,
        )
        return ChatChunk(**self._head, choices=[choice], engine=delta.engine, usage=usage)

    def last_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._head, choices=[], usage=usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> ChatCompletion:
        formatted = [
            ChatChoice(
                index=each.index,
                message=AssistantMessage(content=each.text),
                logprobs=chat_logprobs(self._tokenizer, each),
                finish_reason=each.finish_reason,
            )
            for each in choices
        ]
        return ChatCompletion(**self._head, choices=formatted, usage=usage)


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Serve one request. Raises what `dualpace.server.errors` knows how to tell the client."""
    asked = parse_request(ChatRequest, await service.read_json(request))
    model = service.check_model(asked.model)
    if asked.add_special_tokens:
        raise RequestError(
            "add_special_tokens is not supported: the chat template writes them",
            param="add_special_tokens",
        )
    params = asked.sampling_params({"max_tokens": None, **service.default_sampling})
    if not asked.messages:
        raise RequestError("messages must not be empty", param="messages")
    messages = [
        {"role": message.role, "content": plain_text(index, message)}
        for index, message in enumerate(asked.messages)
    ]
    characters = sum(len(each["content"]) for each in messages)
    check_text(characters, "messages", service.frontend.limits)
    apply = service.frontend.tokenizer.apply_chat_template
    ids = await service.tokenize(lambda: apply(messages))
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    stream = service.frontend.submit(
        [ids], params, request_id, param="messages", must_fit=asked.output_field
    )
    form = ChatFormat(request_id, model, service.frontend.tokenizer)
    meter = Meter(len(ids))
    if asked.stream:
        return EventStream(stream, form, meter, asked.stream_options)
    return await answer_whole(request, stream, form, meter)


def plain_text(index: int, message: ChatMessage) -> str:
    """The text of a message, its parts joined. Raises `RequestError` where it is not all text."""
    where = f"messages[{index}]"
    if message.tool_calls or message.function_call:
        raise RequestError(f"{where}: tool calls are not supported", param="messages")
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise RequestError(f"{where}.content is missing", param="messages")
    texts = []
    for part in message.content:
        if part.type != "text":
            raise RequestError(
                f"{where}: content parts of type {part.type!r} are not supported, only text",
                param="messages",
            )
        if part.text is None:
            raise RequestError(f"{where}: a text part has no text", param="messages")
        texts.append(part.text)
    return "\n".join(texts)
