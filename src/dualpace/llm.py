"""`LLM`: the whole server inside a Python program, without HTTP, as vLLM users know it.

The engines run in their own processes; the frontend runs on an event loop in a thread of this one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from rich.progress import Progress

from dualpace.core.config import EngineOptions
from dualpace.core.errors import ConfigError, EngineError, RequestError
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.sampling import SamplingParams
from dualpace.server.stream import Stream
from dualpace.server.tokenizer import Tokenizer
from dualpace.wiring import Server

Result = TypeVar("Result")
Prompt = str | Sequence[int] | Mapping[str, Any]
SIGNALS_SEEN_AFTER = 0.2  # seconds within which a Ctrl-C is noticed


@dataclass
class Logprob:
    """`rank` 1 is the likeliest token of its position."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice. `engines`: tokens made by each engine.

    With `SamplingParams.logprobs`, `logprobs` holds for each token the sampled id's and those of
    the likeliest, by id, and `cumulative_logprob` is the sum over the sampled.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    engines: Counter[str] = field(default_factory=Counter)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """A model ready to generate.

    `model` and the keyword options are those of `dualpace serve` (`EngineOptions`), with
    underscores. Raises `ConfigError`, `ModelError`, `HardwareError` or `EngineError` if it cannot
    start. Close it with `close()` or a `with` block; a forgotten one closes when it is collected.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.options = _engine_options({"model": os.fspath(model), **options})
        self._loop = asyncio.new_event_loop()
        starting = self._loop.create_task(Server.start(self.options))
        thread = threading.Thread(target=self._loop.run_forever, name="dualpace", daemon=True)
        thread.start()
        try:
            server = self._await(starting)
        except BaseException:
            self._await(_abandon(starting))
            _stop_loop(self._loop, thread)
            raise
        self._frontend = server.frontend
        self._failed = server.supervisor.failed
        self._close = weakref.finalize(self, _shut_down, self._loop, thread, server)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, a list of token ids, or a dict with `prompt` or
        `prompt_token_ids`. All are batched; results come in the order of the prompts.

        Raises `RequestError` before anything runs if a prompt cannot be served.
        """
        encode = self._frontend.tokenizer.encode
        jobs: list[tuple[str | None, list[int]]] = []
        for prompt in _as_list(prompts):
            text, ids = _split(prompt)
            jobs.append((text, encode(text) if ids is None else ids))
        return self._run(jobs, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        several: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self._frontend.tokenizer.apply_chat_template
        return self._run([(None, template(one)) for one in several], sampling_params, use_tqdm)

    def stream_chat(
        self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams
    ) -> Iterator[str]:
        """Answer one conversation; yields pieces of text as they come."""
        prompt = self._frontend.tokenizer.apply_chat_template(messages)
        deltas = self._frontend.generate(prompt, sampling_params)
        try:
            while True:
                try:
                    delta = self._await(anext(deltas))
                except StopAsyncIteration:
                    return
                yield delta.text
        finally:
            self._await(deltas.aclose())

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._frontend.tokenizer

    def close(self) -> None:
        """Stop the engines. Harmless when done before."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(
        self,
        jobs: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        if not self._close.alive:
            raise EngineError("this LLM is closed")
        if self._failed.done():
            self._failed.result()
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(jobs)
        else:
            each = list(params)
        if len(each) != len(jobs):
            raise RequestError(f"{len(jobs)} prompts but {len(each)} sampling_params")
        with Progress(disable=not show_progress) as progress:
            task = progress.add_task("Generating", total=len(jobs))

            async def run() -> list[RequestOutput]:
                streams: list[Stream] = []
                try:
                    for (_, ids), settings in zip(jobs, each, strict=True):
                        streams.append(self._frontend.submit([ids], settings))
                    work = [
                        _collect(*job, self._frontend.tokenizer)
                        for job in zip(streams, jobs, each, strict=True)
                    ]
                    return await asyncio.gather(*(_then(one, advance) for one in work))
                finally:
                    for stream in streams:
                        stream.close()

            def advance() -> None:
                progress.advance(task)

            return self._await(run())

    def _await(self, work: Awaitable[Result]) -> Result:
        async def wait() -> Result:
            return await work

        future = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        try:
            # A signal may be delivered to another thread, and then it wakes nobody: Python acts on
            # it when this thread runs next.
            while not concurrent.futures.wait({future}, SIGNALS_SEEN_AFTER).done:
                pass
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _collect(
    stream: Stream,
    job: tuple[str | None, list[int]],
    params: SamplingParams,
    tokenizer: Tokenizer,
) -> RequestOutput:
    outputs = [CompletionOutput(index) for index in range(params.n)]
    if params.logprobs is not None:
        for output in outputs:
            output.cumulative_logprob, output.logprobs = 0.0, []
    while deltas := await stream.take():
        for delta in deltas:
            output = outputs[delta.index]
            output.text += delta.text
            output.token_ids += delta.token_ids
            output.engines.update([delta.engine] * len(delta.token_ids))
            output.finish_reason = delta.finish_reason
            if output.logprobs is not None and output.cumulative_logprob is not None:
                for token_id, each in zip(delta.token_ids, delta.logprobs, strict=True):
                    output.cumulative_logprob += each.logprob
                    output.logprobs.append(_by_id(token_id, each, tokenizer))
    return RequestOutput(*job, outputs)


def _by_id(token_id: int, reported: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The sampled token first, then the likeliest that are others."""

    def one(token_id: int, logprob: float, rank: int) -> Logprob:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return Logprob(logprob, rank, text)

    by_id = {token_id: one(token_id, reported.logprob, reported.rank)}
    for rank, (top_id, logprob) in enumerate(
        zip(reported.top_ids, reported.top_logprobs, strict=True), 1
    ):
        by_id.setdefault(top_id, one(top_id, logprob, rank))
    return by_id


async def _then(work: Coroutine[Any, Any, Result], done: Callable[[], None]) -> Result:
    result = await work
    done()
    return result


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _split(prompt: Prompt) -> tuple[str, list[int] | None]:
    """Text and token ids of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt", ""), list(prompt["prompt_token_ids"])
        if "prompt" in prompt:
            return prompt["prompt"], None
        raise RequestError("a prompt dict needs 'prompt' or 'prompt_token_ids'", param="prompt")
    return "", list(prompt)


def _engine_options(given: dict[str, Any]) -> EngineOptions:
    """Raises `ConfigError` for an unknown option or a value of the wrong type."""
    unknown = given.keys() - set(EngineOptions.__struct_fields__)
    if unknown:
        raise ConfigError(f"unknown options: {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(given, EngineOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(str(error)) from None


async def _abandon(starting: asyncio.Task[Server]) -> None:
    """End a start that is not wanted any more, however far it has come; leaves no engine."""
    if not starting.cancelling():  # once more would cut its cleaning up short
        starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()  # it was complete before it heard of the interruption


def _shut_down(loop: asyncio.AbstractEventLoop, thread: threading.Thread, server: Server) -> None:
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    _stop_loop(loop, thread)


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    with contextlib.suppress(RuntimeError):
        thread.join()
    loop.close()
