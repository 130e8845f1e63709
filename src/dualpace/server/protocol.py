"""Requests and responses of the OpenAI API, as far as DualPace speaks it, and vLLM's extra fields.

Types only, and which fields are refused: all that are neither obeyed nor known to have no effect on
the answer, as one that a client could rely on must not be dropped in silence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualpace.core.errors import RequestError
from dualpace.core.logprobs import MAX_LOGPROBS
from dualpace.core.messages import EngineName
from dualpace.core.request import FinishReason
from dualpace.core.sampling import MAX_BIASED_IDS, SamplingParams

MAX_NAME_SHOWN = 100  # characters of the name of an unknown field
MAX_ID_DIGITS = 10  # of a token id in the keys of logit_bias

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
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

# About the client, its bill, a cache, or fields that are refused: the answer is the same without.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_salt",
        "guided_decoding_backend",
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

StopList = Annotated[list[str], Field(fail_fast=True)]
IdList = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` (vLLM): every chunk carries the usage so far."""

    model_config = ConfigDict(strict=True, extra="forbid")

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
    max_completion_tokens: int | None = None  # the newer name of the same
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None  # looked at by hand: it may hold millions of items
    top_logprobs: int | None = None
    seed: int | None = None
    stop: str | StopList | None = None
    stop_token_ids: IdList | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def output_field(self) -> str | None:
        """The field that says how many tokens the client asks for, if one does."""
        names = ("max_completion_tokens", "max_tokens")
        return next((name for name in names if getattr(self, name) is not None), None)

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside the one sampled; None: no logprobs.

        Raises `RequestError`.
        """

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's decoding options over `defaults`. Raises `RequestError`."""
        if self.max_completion_tokens is None:
            return self._sampling_params(defaults)
        try:
            newer = self.model_copy(update={"max_tokens": self.max_completion_tokens})
            return newer._sampling_params(defaults)
        except RequestError as error:
            if error.param == "max_tokens":
                raise RequestError(
                    str(error).replace("max_tokens", "max_completion_tokens", 1),
                    param="max_completion_tokens",
                ) from None
            raise

    def _sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of other than n is not supported", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        asked = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        asked["logit_bias"] = parse_logit_bias(self.logit_bias)
        asked["logprobs"] = self.num_logprobs()
        return SamplingParams(
            **{**defaults, **{name: value for name, value in asked.items() if value is not None}}
        )


def parse_logit_bias(given: Any) -> dict[int, Any] | None:
    """Biases by token id; the API has the ids as text. Raises `RequestError`."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestError("logit_bias must be an object of token ids", param="logit_bias")
    if len(given) > MAX_BIASED_IDS:
        raise RequestError(
            f"logit_bias takes at most {MAX_BIASED_IDS} ids, got {len(given)}", param="logit_bias"
        )
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise RequestError(f"logit_bias of id {key} must be a number", param="logit_bias")
        biases[int(key)] = bias
    return biases


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` is looked at by hand: it may hold millions of items."""

    prompt: Any
    add_special_tokens: bool | None = None
    logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        if self.top_logprobs:
            raise RequestError(
                "top_logprobs is not supported here: logprobs is the number", param="top_logprobs"
            )
        return self.logprobs


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
    add_special_tokens: bool | None = None
    logprobs: bool | None = None

    def num_logprobs(self) -> int | None:
        count = self.top_logprobs or 0
        if not 0 <= count <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {count}",
                param="top_logprobs",
            )
        if count and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return count if self.logprobs else None


RequestModel = TypeVar("RequestModel", bound=GenerationRequest)


def parse_request(kind: type[RequestModel], fields: object) -> RequestModel:
    """A request from decoded JSON. Raises `RequestError` naming the field to blame."""
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        # In Python 0 == False, which is not what a client means by it.
        if value is not None and not any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
        ):
            raise RequestError(f"{name} is not supported", param=name)
    known = kind.model_fields.keys() | _NEUTRAL.keys() | _WITHOUT_EFFECT
    for name, value in fields.items():
        if name not in known and value is not None:
            shown = name if len(name) <= MAX_NAME_SHOWN else f"{name[:MAX_NAME_SHOWN]}…"
            raise RequestError(f"{shown}: there is no such field here", param=shown)
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


class CompletionLogprobs(BaseModel):
    """One item a token. `text_offset` counts characters from the beginning of the output."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
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


class LikelyToken(BaseModel):
    """`bytes` are exact where a token is only a part of a character, and `token` cannot be."""

    token: str
    logprob: float
    bytes: list[int]


class SampledToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    content: list[SampledToken]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
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
    logprobs: ChatLogprobs | None = None
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
