"""Sends requests to /v1/completions and records when every token arrived.

No limit on connections: what waits, waits in the server, where it is measured. Knows no model and
no engine; reads the field `engine` of a chunk if there is one.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import httpx
import msgspec

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.replay import Course, Tally
from dualpace.bench.replay import replay as replay_load
from dualpace.core.errors import DualPaceError
from dualpace.core.garbage import frozen_heap

CONNECT_TIMEOUT_S = 60.0
# Connections per pool: the pool's bookkeeping is linear in its connections for each request.
POOL_SIZE = 64
ERROR_TEXT_LIMIT = 200
MAX_LINE_BYTES = 16 * 2**20  # of an event: who sends more speaks another protocol
MAX_TOKENS = 10**9  # that a server may claim to have made for one request


class ServerError(DualPaceError):
    """The server cannot be reached, or does not answer like an OpenAI-compatible one."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of /v1/models. `max_model_len` is in tokens, None where the server hides it."""

    id: str
    max_model_len: int | None


def api_root(base_url: str) -> str:
    """`base_url` without a trailing slash or /v1, both of which people write."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def ask_models(base_url: str) -> list[ServedModel]:
    """The models a server offers, none if it has no such list.

    Raises `ServerError` when it cannot be asked.
    """
    url = f"{api_root(base_url)}/v1/models"
    try:
        response = httpx.get(url, timeout=10.0, trust_env=False)
        if response.status_code == httpx.codes.NOT_FOUND:
            return []
        response.raise_for_status()
        cards = response.json()["data"]
        return [_served(card) for card in cards]
    except httpx.HTTPStatusError as error:
        said = _error_text(error.response.content)
        raise ServerError(f"{url} answered HTTP {error.response.status_code}: {said}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(
            f"no server answers at {base_url} ({error or type(error).__name__}). "
            "Is it running and ready? `dualpace serve MODEL` starts one; --base-url says where."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ServerError(f"{url} did not answer with a list of models") from None


def _served(card: dict[str, Any]) -> ServedModel:
    """Raises `KeyError`, `TypeError` or `AttributeError` where that is no model."""
    name, longest = card["id"], card.get("max_model_len")
    if not isinstance(name, str) or not (longest is None or type(longest) is int):
        raise TypeError
    if longest is not None and longest < 2:
        raise ServerError(f"the server tells of {name} that its max_model_len is {longest}")
    return ServedModel(name, longest)


async def replay(
    base_url: str,
    model: str,
    load: Sequence[LoadRequest],
    prompts: Sequence[list[int]],
    *,
    begin: Callable[[], Awaitable[float]] | None = None,
    silence_timeout_s: float = 600.0,
    **course: Unpack[Course],
) -> list[RequestRecord]:
    """`bench.replay.replay` against a server.

    prompts: token ids, one list per request. begin: awaited once all is prepared; gives the moment
    of `time.perf_counter` that is second 0. A request that the server leaves without a byte for
    `silence_timeout_s` counts as failed.
    """
    _allow_open_files(len(load) + 256)
    # Encoded beforehand: encoding thousands of tokens while replaying would delay the sends.
    bodies = [_body(model, request, prompt) for request, prompt in zip(load, prompts, strict=True)]
    url = f"{api_root(base_url)}/v1/completions"
    async with contextlib.AsyncExitStack() as stack:
        tls = httpx.create_ssl_context(trust_env=False)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    verify=tls,
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                    timeout=httpx.Timeout(silence_timeout_s, connect=CONNECT_TIMEOUT_S),
                    # A proxy between client and server would be measured too.
                    trust_env=False,
                )
            )
            for _ in range(-(-len(load) // POOL_SIZE))
        ]
        stack.enter_context(frozen_heap())

        async def send(index: int, record: RequestRecord, tally: Tally) -> None:
            try:
                await _stream(clients[index % len(clients)], url, bodies[index], record, tally)
            except (httpx.HTTPError, OSError, ValueError) as error:
                raise ServerError(str(error) or type(error).__name__) from error

        return await replay_load(load, send, start=await begin() if begin else None, **course)


def _body(model: str, request: LoadRequest, prompt: list[int]) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            # vLLM's name: every chunk then tells the tokens so far, in servers that know it.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()


async def _stream(
    client: httpx.AsyncClient,
    url: str,
    body: bytes,
    record: RequestRecord,
    tally: Tally,
) -> None:
    """Send one request and fill its record. Raises httpx.HTTPError, OSError or ValueError."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    reader = _StreamReader(record)
    async with client.stream("POST", url, content=body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            said = _error_text(await response.aread())
            raise ValueError(f"HTTP {response.status_code}: {said}")
        async for arrived, data in _events(response, tally.now):
            tally.add_tokens(reader.feed(data, arrived), arrived)
    reader.close()


async def _events(
    response: httpx.Response, clock: Callable[[], float]
) -> AsyncIterator[tuple[float, bytes]]:
    """Arrival by `clock` and data of every server-sent event.

    Split by hand: httpx's line iterator also breaks at U+2028, U+0085 and their like, which a
    model may generate and JSON may carry raw.
    """
    pending = b""
    async for block in response.aiter_bytes():
        arrived = clock()
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()
        if len(pending) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")


class _StreamReader:
    """Turns the events of one stream into the chunks of its record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._complete = False
        self._seen = 0  # tokens recorded
        self._total: int | None = None  # tokens by the server's account

    def feed(self, data: bytes, now: float) -> int:
        """Take one event that arrived at `now`; returns the tokens recorded for it."""
        if data == b"[DONE]":
            self._complete = True
            return 0
        try:
            return self._take(json.loads(data), now)
        except (
            AttributeError, LookupError, TypeError, json.JSONDecodeError, UnicodeDecodeError,
            RecursionError,
        ):  # fmt: skip
            raise ValueError(f"malformed chunk: {data[:ERROR_TEXT_LIMIT]!r}") from None

    def _take(self, event: dict[str, Any], now: float) -> int:
        if event.get("error"):
            raise ValueError(f"error in the stream: {_error_text(json.dumps(event).encode())}")
        choice: dict[str, Any] = (event.get("choices") or [{}])[0]
        if choice.get("finish_reason"):
            self._record.finish_reason = choice["finish_reason"]
            self._complete = True
        tokens = self._count(event.get("usage"), bool(choice.get("text")))
        if tokens:
            engine = event.get("engine")
            self._record.chunks.append(
                Chunk(now, tokens, engine if isinstance(engine, str) else None)
            )
            self._seen += tokens
        return tokens

    def _count(self, usage: dict[str, Any] | None, has_text: bool) -> int:
        """Tokens of a chunk: from the running usage where given, else 1 for a chunk with text.

        A usage that stays at 0 until the end is none.
        """
        if usage and usage.get("completion_tokens"):
            self._total = _count_of(usage["completion_tokens"])
            self._record.prompt_tokens = _count_of(
                usage.get("prompt_tokens") or self._record.prompt_tokens
            )
            if not self._record.estimated:
                return max(0, self._total - self._seen)
        elif has_text:
            self._record.estimated = True
        return int(has_text and self._record.estimated)

    def close(self) -> None:
        """The response has ended: check that it is whole and settle guessed counts."""
        if not self._complete:
            raise ValueError("the stream ended before the answer did")
        if self._total is not None and self._record.estimated:
            self._record.estimated = self._total != self._seen
            self._record.chunks = _spread(self._record.chunks, self._total)
        if not self._record.chunks:
            raise ValueError("the stream carried no tokens")


def _count_of(value: object) -> int:
    """Raises `TypeError` for what is no number of tokens."""
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise TypeError
    return value


def _spread(chunks: list[Chunk], total: int) -> list[Chunk]:
    """Deal `total` tokens out to the chunks as evenly as whole tokens allow, earlier ones first.

    A server that holds back half a character sends fewer chunks than tokens.
    """
    share, rest = divmod(total, len(chunks))
    dealt = [
        msgspec.structs.replace(chunk, tokens=share + (index < rest))
        for index, chunk in enumerate(chunks)
    ]
    return [chunk for chunk in dealt if chunk.tokens]


def _error_text(body: bytes) -> str:
    """The message of an OpenAI-style error body, else the body's beginning; one line."""
    text: object = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    return " ".join(str(text).split())[:ERROR_TEXT_LIMIT] or "(no message)"


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files: it would cap the connections silently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
