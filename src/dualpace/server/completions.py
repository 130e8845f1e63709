"""POST /v1/completions: text after a prompt, or after each of several."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from dualpace.core.errors import RequestError
from dualpace.server.checks import check_text
from dualpace.server.logprobs import TextOffsets, completion_logprobs
from dualpace.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionRequest,
    Usage,
    parse_request,
)
from dualpace.server.serving import EventStream, Meter, Service, answer_whole
from dualpace.server.stream import Delta
from dualpace.server.tokenizer import Tokenizer


class CompletionFormat:
    """Deltas as completion objects."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}

    def chunk(self, delta: Delta, usage: Usage | None) -> CompletionChunk:
        choices = [self._choice(delta)]
        return CompletionChunk(**self._head, choices=choices, engine=delta.engine, usage=usage)

    def last_chunk(self, usage: Usage) -> CompletionChunk:
        return CompletionChunk(**self._head, choices=[], usage=usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Completion:
        formatted = [self._choice(each) for each in choices]
        return Completion(**self._head, choices=formatted, usage=usage)

    def _choice(self, delta: Delta) -> CompletionChoice:
        offsets = self._offsets.setdefault(delta.index, TextOffsets())
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=completion_logprobs(self._tokenizer, delta, offsets),
            finish_reason=delta.finish_reason,
        )


async def create_completion(service: Service, request: Request) -> Response:
    """Serve one request. Raises what `dualpace.server.errors` knows how to tell the client."""
    asked = parse_request(CompletionRequest, await service.read_json(request))
    model = service.check_model(asked.model)
    params = asked.sampling_params(service.default_sampling)
    special = asked.add_special_tokens is not False
    prompts = split_prompts(asked.prompt)
    service.frontend.check(params, len(prompts))  # before many or long texts are tokenized
    for prompt in filter(lambda each: isinstance(each, str), prompts):
        check_text(len(prompt), "prompt", service.frontend.limits)
    encode = service.frontend.tokenizer.encode
    ids = await service.tokenize(
        lambda: [encode(p, special) if isinstance(p, str) else p for p in prompts]
    )
    request_id = f"cmpl-{uuid.uuid4().hex}"
    stream = service.frontend.submit(ids, params, request_id, must_fit=asked.output_field)
    form = CompletionFormat(request_id, model, service.frontend.tokenizer)
    meter = Meter(sum(len(prompt) for prompt in ids))
    if asked.stream:
        return EventStream(stream, form, meter, asked.stream_options)
    return await answer_whole(request, stream, form, meter)


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts in any of the four forms of the field. Raises `RequestError`."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(item, list) and _are_ids(item) for item in prompt):
            return prompt
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids, and not empty",
        param="prompt",
    )


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)  # a bool is an int too
