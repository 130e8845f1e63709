"""What both generating endpoints share: reading a request, counting tokens, two ways to answer.

Knows HTTP and deltas; what a response looks like is told by `Format`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from dualpace.core.errors import DualPaceError, RequestError
from dualpace.core.messages import EngineName
from dualpace.core.sampling import SamplingParams
from dualpace.server.errors import CLIENT_GONE, NotReadyError, UnknownModelError, error_event
from dualpace.server.frontend import Frontend
from dualpace.server.metrics import Metrics
from dualpace.server.protocol import StreamOptions, Usage
from dualpace.server.stream import Delta, Stream, merge

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_BODY_BYTES = 32 * 2**20


class Format(Protocol):
    """How one endpoint writes its answer."""

    def chunk(self, delta: Delta, usage: Usage | None) -> BaseModel:
        """The streamed event of one delta."""
        ...

    def last_chunk(self, usage: Usage) -> BaseModel:
        """The streamed event that has the final usage and no choice."""
        ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> BaseModel:
        """The response in one piece, all of a choice being one delta."""
        ...


class Service:
    """One server's frontend, model names and defaults, as the endpoints need them.

    model_names: accepted names, the first one the default. default_sampling: fields of
    `SamplingParams` that a request need not give, such as the checkpoint's generation config has.
    metrics: the frontend's, also before there is one. Raises `RequestError` where a default cannot
    work.
    """

    def __init__(
        self,
        model_names: Sequence[str],
        metrics: Metrics,
        *,
        default_sampling: Mapping[str, Any] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.model_names = tuple(model_names)
        self.metrics = metrics
        self.default_sampling = dict(default_sampling or {})
        SamplingParams(**self.default_sampling)  # a wrong default shows now, not at a client
        self.started = int(time.time())
        self._frontend: Frontend | None = None
        self._max_body_bytes = max_body_bytes
        # One thread: a long prompt must not stop the streams, and tokenizers are not reentrant.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def open(self, frontend: Frontend) -> None:
        """The engines have loaded the model: requests are taken from now on."""
        self._frontend = frontend

    @property
    def loading(self) -> bool:
        return self._frontend is None

    @property
    def frontend(self) -> Frontend:
        """Raises `NotReadyError` while the model is loading."""
        if self._frontend is None:
            raise NotReadyError("the model is still loading: /ready tells when it is there")
        return self._frontend

    def check_model(self, name: str | None) -> str:
        """The model to answer as. Raises `UnknownModelError`."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise UnknownModelError(
                f"the model {name!r} does not exist here; served: {served}", param="model"
            )
        return name or self.model_names[0]

    async def tokenize(self, function: Callable[[], Result]) -> Result:
        """Run tokenizer work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def read_json(self, request: Request) -> object:
        """The decoded body. Raises `RequestError`, or `HTTPException` 413 for one that is too long.

        A body over the limit is read to its end and thrown away: a client that is still sending
        would see a broken connection instead of the answer.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body, size = bytearray(), 0
        async for piece in request.stream():
            size += len(piece)
            if size <= self._max_body_bytes:
                body += piece
        if size > self._max_body_bytes:
            raise HTTPException(413, f"the body is longer than {self._max_body_bytes} bytes")
        if media_type != "application/json":
            raise RequestError("the content type must be application/json")
        try:
            return from_json(body)
        except ValueError as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)


class Meter:
    """Counts the tokens of one response."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._by_engine: dict[EngineName, int] = {"gpu": 0, "cpu": 0}

    def add(self, delta: Delta) -> None:
        self._by_engine[delta.engine] += len(delta.token_ids)

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        completion_tokens = sum(self._by_engine.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            completion_tokens_by_engine=dict(self._by_engine),
        )


class EventStream(StreamingResponse):
    """Server-sent events of one stream, which is closed however the response ends."""

    def __init__(
        self, stream: Stream, form: Format, meter: Meter, options: StreamOptions | None
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(
            _events(stream, form, meter, options or StreamOptions()),
            media_type="text/event-stream",
            headers=headers,
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator: one that was never started runs no `finally`.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _events(
    stream: Stream, form: Format, meter: Meter, options: StreamOptions
) -> AsyncIterator[bytes]:
    """One event per delta; those that have piled up go out in one write."""
    running = bool(options.include_usage and options.continuous_usage_stats)
    try:
        while deltas := await stream.take():
            events = []
            for delta in deltas:
                meter.add(delta)
                events.append(_event(form.chunk(delta, meter.usage if running else None)))
            yield b"".join(events)
        if options.include_usage:
            yield _event(form.last_chunk(meter.usage))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        if not isinstance(error, DualPaceError):
            logger.exception("a stream broke")
        yield error_event(error)


def _event(chunk: BaseModel) -> bytes:
    return f"data: {chunk.model_dump_json()}\n\n".encode()


async def answer_whole(request: Request, stream: Stream, form: Format, meter: Meter) -> Response:
    """The response in one piece. Raises what the stream does; aborts once the client has left."""
    collecting = asyncio.create_task(_collect(stream))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_GONE)
        deltas = collecting.result()
    finally:
        collecting.cancel()
        leaving.cancel()
        stream.close()
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        meter.add(delta)
        choices.setdefault(delta.index, []).append(delta)
    body = form.whole([merge(choices[index]) for index in sorted(choices)], meter.usage)
    return Response(body.model_dump_json(), media_type="application/json")


async def _collect(stream: Stream) -> list[Delta]:
    collected = []
    while deltas := await stream.take():
        collected += deltas
    return collected


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
