"""What a request must be for the engines to take it; errors name the field and the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dualpace.core.errors import CapacityError, RequestError
from dualpace.core.messages import EngineName
from dualpace.core.sampling import SamplingParams

MAX_CHOICES = 4096  # of one client request: prompts times n
MAX_TOKEN_CHARACTERS = 128  # no tokenizer that we know of has longer tokens
MAX_STOP_CHARACTERS = 1024  # of one stop string: each new token is compared with it


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows: lengths in tokens, ids below `vocab_size`."""

    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def verified(params: SamplingParams) -> SamplingParams:
    """A copy that has been through every check of types and values.

    A Python caller may have given any type, or changed a field since; what has the wrong type would
    end the engine that decodes it.
    """
    try:
        return msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        # The path is "$.name", "$.name[…]", or "key in $.name" where a key has the wrong type.
        message, _, path = str(error).partition(" - at `")
        param = path.partition("$.")[2].partition("[")[0].rstrip("`")
        raise RequestError(f"{param}: {message}", param=param) from None


def check_params(params: SamplingParams, prompts: int, limits: Limits) -> None:
    """Refuse what cannot be done for so many prompts, whatever they are."""
    if prompts * params.n > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with n={params.n} are more than {MAX_CHOICES} choices",
            param="n" if params.n > 1 else "prompt",
        )
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in params.stop or ()):
        raise RequestError(
            f"a stop string is longer than {MAX_STOP_CHARACTERS} characters", param="stop"
        )
    for token_id in params.stop_token_ids or ():
        _check_id(token_id, "stop_token_ids", limits)
    for token_id in params.logit_bias or ():
        _check_id(token_id, "logit_bias", limits)


def check_text(characters: int, param: str, limits: Limits) -> None:
    """Refuse a prompt that is too long whatever its tokens, before time is spent on them."""
    if characters > limits.max_model_len * MAX_TOKEN_CHARACTERS:
        raise RequestError(
            f"the prompt has {characters} characters, more than {limits.max_model_len} tokens, "
            "the maximum model length, can hold",
            param=param,
        )


def check_prompt(prompt: Sequence[int], param: str, limits: Limits) -> None:
    """Refuse one that the model cannot continue."""
    size = len(prompt)
    if size == 0:
        raise RequestError("the prompt is empty: it has no tokens", param=param)
    if size >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {size} tokens, which leaves no room for output: "
            f"the maximum model length is {limits.max_model_len} tokens",
            param=param,
        )
    for token_id in prompt:
        _check_id(token_id, param, limits)


def check_room(
    size: int, param: str, longest: Mapping[EngineName, int], given_up: Sequence[EngineName]
) -> None:
    """Refuse a prompt of `size` tokens for which no pool has room.

    longest: tokens of a request that each engine's pool holds; given_up: those that are down.
    """
    if size + 1 > max(longest.values()):
        held = ", ".join(f"{name} {tokens}" for name, tokens in longest.items())
        raise CapacityError(
            f"the prompt has {size} tokens and needs KV room for {size + 1}, "
            f"more than any pool has (tokens: {held}{_down(given_up)})",
            param=param,
        )


def check_output(
    size: int,
    max_tokens: int,
    param: str,
    longest: int,
    limits: Limits,
    given_up: Sequence[EngineName],
) -> None:
    """Refuse more tokens than fit behind a prompt of `size`. longest: most of a request; given_up:
    engines that are down, without which there may be less room than there was."""
    if size + max_tokens <= longest:
        return
    if longest == limits.max_model_len:
        bound = f"the maximum model length is {longest} tokens"
    else:
        bound = f"the largest KV pool holds {longest} tokens of a request{_down(given_up)}"
    raise RequestError(
        f"{param}={max_tokens} is too large: {bound}, and the prompt has {size}, which leaves "
        f"{longest - size}",
        param=param,
    )


def _down(engines: Sequence[EngineName]) -> str:
    return "".join(f", {name} is down" for name in engines)


def _check_id(token_id: int, param: str, limits: Limits) -> None:
    if type(token_id) is not int:  # no engine could decode the message it travels in
        raise RequestError(f"token id {token_id!r} is not an integer", param=param)
    if not 0 <= token_id < limits.vocab_size:
        raise RequestError(
            f"token id {token_id} is outside the vocabulary of {limits.vocab_size} ids",
            param=param,
        )
