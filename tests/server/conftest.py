"""A server on loopback over an engine that does what the test tells it to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable

import httpx
import msgspec
import openai
import pytest
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import (
    Abort,
    EngineReady,
    Envelope,
    Message,
    Submit,
    TokenEvent,
    Tokens,
)
from dualpace.core.request import RequestState
from dualpace.models.token_bytes import TokenBytes
from dualpace.server.api import create_app
from dualpace.server.checks import Limits
from dualpace.server.frontend import Frontend
from dualpace.server.serving import Service

EOS = "<|eos|>"
CORPUS = ["the quick brown fox jumps over the lazy dog, stop here", "héllo wörld 你好 🙂"]
MODEL_LENGTH = 100


class SmallTokenizer:
    """The server's tokenizer protocol over a `tokenizers.Tokenizer`."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.eos = inner.token_to_id(EOS)
        self.token_bytes = TokenBytes(inner)

    @property
    def vocab_size(self) -> int:
        return self.inner.get_vocab_size()

    def encode(self, text, add_special_tokens=True):
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=True):
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages):
        turns = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return self.encode(turns)


@pytest.fixture(scope="session")
def byte_level():
    """A vocabulary of the Llama 3 and Qwen kind: all 256 bytes and some merges."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[EOS],
            show_progress=False,
        ),
    )
    return SmallTokenizer(inner)


@pytest.fixture(scope="session")
def sentencepiece():
    """A vocabulary of the Llama 2 kind: ▁ for space, bytes for what it lacks."""
    pieces = [EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "d"), ("o", "g"), ("▁d", "og")]
    pieces += ["".join(pair) for pair in merges]
    inner = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True)
    )
    inner.add_special_tokens([EOS])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return SmallTokenizer(inner)


class FakeEngines:
    """Both engines: notes what they are sent and says what the test wants.

    `script` answers a Submit with envelopes, delivered one by one; None leaves it to the test.
    """

    def __init__(self, tokenizer: SmallTokenizer) -> None:
        self.tokenizer = tokenizer
        self.sent: list[tuple[str, Message]] = []
        self.script: Callable[[RequestState], Iterable[Envelope]] | None = self.say()
        self.frontend: Frontend
        self._tasks: set[asyncio.Task] = set()

    def send(self, to: str, message: Message) -> None:
        wire = msgspec.msgpack.encode(Envelope("frontend", 0, message))
        message = msgspec.msgpack.decode(wire, type=Envelope).body
        self.sent.append((to, message))
        if isinstance(message, Submit) and self.script is not None:
            task = asyncio.ensure_future(self._answer(self.script(message.state)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            await asyncio.sleep(0)
            self.frontend.on_envelope(envelope)

    def say(self, text: str = " lazy dog", end: bool = True, engines: str = "gc"):
        """A script: the tokens of `text`, taken in turn by the engines named, one per envelope.

        Token i of a request that asks has logprob -i / 4 and ids 0, 1, … as the likeliest.
        """

        def script(state: RequestState) -> Iterable[Envelope]:
            ids = self.tokenizer.encode(text) + [self.tokenizer.eos] * end
            for index, token_id in enumerate(ids[: state.params.max_tokens]):
                finish = "length" if index + 1 == state.params.max_tokens else None
                if token_id in state.params.stop_ids:
                    finish = "stop"
                yield self.tokens(
                    {"g": "gpu", "c": "cpu"}[engines[index % len(engines)]],
                    TokenEvent(
                        state.id, state.epoch, index, token_id, finish,
                        self.logprobs(index, state.params.logprobs),
                    ),
                )  # fmt: skip

        return script

    @staticmethod
    def logprobs(index: int, count: int | None) -> TokenLogprobs | None:
        if count is None:
            return None
        top = [-0.125 * place for place in range(count)]
        return TokenLogprobs(-index / 4, index + 1, list(range(count)), top)

    @staticmethod
    def tokens(sender: str, *events: TokenEvent) -> Envelope:
        return Envelope(sender, 1, Tokens(list(events)))

    def receive(self, sender: str, message: Message) -> None:
        self.frontend.on_envelope(Envelope(sender, 1, message))

    def ready(self, gpu: int = 10_000, cpu: int = 10_000) -> None:
        self.receive("gpu", EngineReady(1, gpu, 32))
        self.receive("cpu", EngineReady(2, cpu, 32))

    def service(self, *names: str, **options) -> Service:
        """What the API serves once the engines are there."""
        service = Service(names, self.frontend.metrics, **options)
        service.open(self.frontend)
        return service

    @property
    def submits(self) -> list[RequestState]:
        return [message.state for _, message in self.sent if isinstance(message, Submit)]

    @property
    def aborts(self) -> list[tuple[str, str]]:
        return [(to, m.request_id) for to, m in self.sent if isinstance(m, Abort)]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that the server does by itself."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def _engines(tokenizer: SmallTokenizer) -> FakeEngines:
    fake = FakeEngines(tokenizer)
    limits = Limits(MODEL_LENGTH, tokenizer.vocab_size, (tokenizer.eos,))
    fake.frontend = Frontend(tokenizer, limits, fake.send)
    return fake


@pytest.fixture
def engines(byte_level) -> FakeEngines:
    """Engines and a frontend without a server, not ready yet."""
    return _engines(byte_level)


@pytest.fixture(scope="module")
async def server(anyio_backend, byte_level) -> AsyncIterator[tuple[FakeEngines, str]]:
    """The engines behind a server, and its address. One for a file: to stop one takes a while."""
    engines = _engines(byte_level)
    app = create_app(engines.service("small", "alias/small", max_body_bytes=100_000))
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio leaves it off on sockets that it did not make, and answers then come 40 ms late.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    uvicorn_server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    )
    serving = asyncio.ensure_future(uvicorn_server.serve([listener]))
    await engines.until(lambda: uvicorn_server.started)
    yield engines, f"http://127.0.0.1:{listener.getsockname()[1]}"
    uvicorn_server.should_exit = True
    await serving
    listener.close()


@pytest.fixture
def served(server) -> FakeEngines:
    """The server's engines, ready and without a past."""
    engines, _ = server
    engines.frontend.fail_all("next test")
    engines.ready()
    engines.sent.clear()
    engines.script = engines.say()
    return engines


@pytest.fixture
async def client(server, served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server[1]}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@pytest.fixture
async def http(server, served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server[1], timeout=20) as http:
        yield http
