"""Requests and responses of the OpenAI API, as far as DualPace speaks it, and vLLM's extra fields.

Types only, and which known fields are refused: an unknown field is ignored, as vLLM does, but one
that a client could rely on must not be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualpace.core.errors import RequestError
from dualpace.core.messages import EngineName
from dualpace.core.request import FinishReason
from dualpace.core.sampling import SamplingParams

# Refused unless the value is one of these, which ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

StopList = Annotated[list[str], Field(fail_fast=True)]
IdList = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` (vLLM): every chunk carries the usage so far."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """Fields that both ways of asking for text share. None means the default."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | StopList | None = None
    stop_token_ids: IdList | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's decoding options over `defaults`. Raises `RequestError`."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of other than n is not supported", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        asked = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        return SamplingParams(
            **{**defaults, **{name: value for name, value in asked.items() if value is not None}}
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` is looked at by hand: it may hold millions of items."""

    prompt: Any
    add_special_tokens: bool | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    add_special_tokens: bool | None = None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.max_completion_tokens is None:
            return super().sampling_params(defaults)
        try:
            newer = self.model_copy(update={"max_tokens": self.max_completion_tokens})
            return super(ChatRequest, newer).sampling_params(defaults)
        except RequestError as error:
            if error.param == "max_tokens":
                raise RequestError(
                    str(error).replace("max_tokens", "max_completion_tokens", 1),
                    param="max_completion_tokens",
                ) from None
            raise


RequestModel = TypeVar("RequestModel", bound=GenerationRequest)


def parse_request(kind: type[RequestModel], fields: object) -> RequestModel:
    """A request from decoded JSON. Raises `RequestError` naming the field to blame."""
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        # In Python 0 == False, but logprobs=0 asks for something that logprobs=false does not.
        if value is not None and not any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
        ):
            raise RequestError(f"{name} is not supported", param=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{path}: {first['msg']}", param=str(first["loc"][0])) from None


# -- responses -----------------------------------------------------------------------------------

Item = TypeVar("Item")
# A field that is left out, rather than null, where there is nothing to say.
Maybe = Annotated[Item | None, Field(exclude_if=lambda value: value is None)]


class Usage(BaseModel):
    """Token counts; by engine too, which is DualPace's own."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_by_engine: dict[EngineName, int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(BaseModel):
    """One streamed event. `engine` made its token; the chunk with the final usage has none."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    engine: Maybe[EngineName] = None
    usage: Maybe[Usage] = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(BaseModel):
    """`role` comes once, with a choice's first text."""

    role: Maybe[Literal["assistant"]] = None
    content: str


class ChatChunkChoice(BaseModel):
    index: int
    delta: MessageDelta
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """One streamed event. `engine` made its token; the chunk with the final usage has none."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    engine: Maybe[EngineName] = None
    usage: Maybe[Usage] = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dualpace"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
