"""The frontend: between clients, who speak of text, and the engines, who speak of tokens.

It numbers requests that pass the checks, keeps the journal, turns token events into text, and knows
which engines answer. It knows no HTTP and no sockets: messages go out through `send` and come in
through `on_envelope`. All of it runs on one event loop and nothing here waits, `generate` apart.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dualpace.core.errors import EngineError, RequestError
from dualpace.core.messages import (
    CPU,
    GPU,
    Abort,
    EngineName,
    EngineReady,
    EngineStats,
    Envelope,
    Failed,
    Lost,
    Submit,
    TokenEvent,
    Tokens,
)
from dualpace.core.request import FinishReason, RequestState
from dualpace.core.sampling import SamplingParams
from dualpace.server.checks import (
    Limits,
    check_output,
    check_params,
    check_prompt,
    check_room,
    verified,
)
from dualpace.server.detokenizer import OutputText
from dualpace.server.errors import NotReadyError
from dualpace.server.journal import Journal, JournalEntry, Released
from dualpace.server.metrics import ENGINES, Metrics
from dualpace.server.stream import Delta, Stream
from dualpace.server.tokenizer import NO_TOKENIZER, NoTokenizer, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Choice:
    """One engine request as the client's stream sees it."""

    index: int
    stream: Stream
    entry: JournalEntry
    text: OutputText
    started: float = field(default_factory=time.monotonic)
    last_token: float | None = None


class Frontend:
    """Requests in, deltas out; `engines` are those that must have answered before the first one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        send: Callable[[str, Submit | Abort], None],
        metrics: Metrics | None = None,
        engines: Sequence[EngineName] = ENGINES,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.metrics = metrics or Metrics()
        self.journal = Journal()
        self._send = send
        self._engines = tuple(engines)
        self._choices: dict[str, _Choice] = {}
        self._arrivals = 0
        self._capacity: dict[EngineName, int] = {}  # tokens of KV, by engine
        self._longest: dict[EngineName, int] = {}  # tokens of a request that it has room for
        self._up: set[EngineName] = set()
        self._seen: set[EngineName] = set()
        self._given_up: set[EngineName] = set()

    # -- readiness -------------------------------------------------------------------------------

    @property
    def missing(self) -> list[EngineName]:
        """Engines that do not answer now, those apart that the server goes on without."""
        return [engine for engine in self._needed if engine not in self._up]

    @property
    def given_up(self) -> list[EngineName]:
        """Engines that the server goes on without; if one answers again, it is welcome."""
        return sorted(self._given_up)

    @property
    def accepting(self) -> bool:
        """True while requests are taken: one engine's absence is bridged once both were there."""
        return "gpu" in self._up and all(engine in self._capacity for engine in self._needed)

    @property
    def kv_tokens(self) -> Mapping[EngineName, int]:
        """Tokens of KV that each engine holds room for, once it has answered."""
        return self._capacity

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output: what the model allows and a pool holds."""
        return min(self.limits.max_model_len, max(self._longest.values()))

    @property
    def _needed(self) -> list[EngineName]:
        return [engine for engine in self._engines if engine not in self._given_up]

    def engine_down(self, engine: EngineName) -> None:
        """The engine died and will be started again; its requests come back as `Lost`."""
        self._up.discard(engine)
        self.metrics.engine_down(engine)

    def host_gone(self) -> None:
        """There is no CPU engine and none to count on: its pool holds nothing from now on."""
        self._given_up.add(CPU)
        self._capacity.pop(CPU, None)
        self._longest.pop(CPU, None)
        self.metrics.engine_given_up(CPU)

    def fail_all(self, reason: str) -> None:
        """No engine answers any more: every stream ends with an `EngineError`."""
        for engine in self._engines:
            self.engine_down(engine)
        self._capacity.clear()
        self._longest.clear()
        for request_id in list(self._choices):
            self._fail(request_id, EngineError(reason))

    # -- requests --------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of all `n` choices; leaving the iterator aborts what still runs.

        Raises what `submit` raises, and `EngineError` where an engine failed.
        """
        stream = self.submit([prompt_ids], sampling_params, request_id)
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    yield delta
        finally:
            stream.close()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        request_id: str | None = None,
        param: str = "prompt",
        must_fit: str | None = None,
    ) -> Stream:
        """Send every prompt `n` times to the engines; choice index = prompt index * n + choice.

        param: the field that errors about a prompt name. must_fit: the field by which the client
        asked for `max_tokens`, if it did; else there are as many as there is room for.
        Raises `RequestError`, `CapacityError` (a prompt that no KV pool could hold) or
        `NotReadyError`; then nothing has been sent.
        """
        params = self.check(params, len(prompts))
        for prompt in prompts:
            check_prompt(prompt, param, self.limits)
            check_room(len(prompt), param, self._longest, self.given_up)
            if must_fit is not None and params.max_tokens is not None:
                check_output(
                    len(prompt), params.max_tokens, must_fit, self.longest, self.limits,
                    self.given_up,
                )  # fmt: skip
        lists = [list(prompt) for prompt in prompts]
        # The arrival number makes an id unique for ever, as the engines' protocol asks of it.
        base = request_id or uuid.uuid4().hex
        ids = [f"{base}-{self._arrivals + index}" for index in range(len(prompts) * params.n)]
        stream = Stream(len(ids), on_close=lambda: self._abort_all(ids))
        messages = []
        for index, request_id in enumerate(ids):
            which, choice = divmod(index, params.n)
            messages.append(self._open(request_id, lists[which], params, choice, index, stream))
        try:
            for message in messages:
                self._send(GPU, message)
        except BaseException:
            stream.close()
            raise
        self.metrics.prompt_tokens.inc(sum(len(prompt) for prompt in prompts))
        return stream

    def _open(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        choice: int,
        index: int,
        stream: Stream,
    ) -> Submit:
        state = RequestState(
            id=request_id,
            arrival=self._arrivals,
            epoch=0,
            prompt=prompt,
            output=[],
            params=params.resolve(
                eos_ids=self.limits.eos_ids, room=self.longest - len(prompt), choice=choice
            ),
        )
        self._arrivals += 1
        submit = self.journal.open(state)
        entry = self.journal.get(request_id)
        assert entry is not None
        text = OutputText(self.tokenizer, prompt, params)
        self._choices[request_id] = _Choice(index, stream, entry, text)
        return submit

    def check(self, params: SamplingParams, prompts: int) -> SamplingParams:
        """What can be said of a request of so many prompts without their tokens.

        Returns a copy of `params`, verified. Raises `NotReadyError` or `RequestError`.
        """
        if not self.accepting:
            raise NotReadyError(f"engines not ready: {', '.join(self.missing) or 'starting'}")
        params = verified(params)
        check_params(params, prompts, self.limits)
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(NO_TOKENIZER, param="stop")
        return params

    # -- messages of the engines -----------------------------------------------------------------

    def on_envelope(self, envelope: Envelope) -> None:
        """Take in one message of an engine. Never waits and never raises for one request's sake."""
        engine: EngineName = "cpu" if envelope.sender == CPU else "gpu"
        match envelope.body:
            case Tokens(events):
                for event in events:
                    self._on_token(event, CPU if event.attended else engine)
            case Failed(request_id, epoch, reason):
                entry = self.journal.get(request_id)
                if entry is not None and epoch >= entry.min_epoch:
                    self._fail(request_id, EngineError(reason))
            case Lost(requests):
                for request_id, epoch in requests:
                    self._on_lost(request_id, epoch)
            case EngineReady(kv_tokens=kv_tokens, longest=longest):
                self._capacity[engine] = kv_tokens
                self._longest[engine] = kv_tokens if longest is None else longest
                self._up.add(engine)
                self._given_up.discard(engine)
                self.metrics.engine_up(engine, again=engine in self._seen)
                self._seen.add(engine)
            case EngineStats() as stats:
                self.metrics.engine_stats(engine, stats)
            case other:
                logger.warning("%s sent the frontend a %s", engine, type(other).__name__)

    def _on_token(self, event: TokenEvent, engine: EngineName) -> None:
        choice = self._choices.get(event.request_id)
        if choice is None:
            return  # ended, or aborted
        try:
            choice.entry.receive(event, engine)
            while event.request_id in self._choices:
                released = choice.entry.release()
                if released is None:
                    return
                self._show(event.request_id, choice, released)
        except Exception:
            logger.exception("request %s: a token could not be shown", event.request_id)
            self._abort_all([event.request_id])
            choice.stream.fail(EngineError("the output could not be decoded"))

    def _on_lost(self, request_id: str, epoch: int) -> None:
        again = self.journal.resubmit(request_id, epoch)
        if isinstance(again, Submit):
            self.metrics.resubmitted.inc()
            self._send(GPU, again)
        elif again is not None:
            choice = self._choices[request_id]
            self._show(request_id, choice, Released(None, choice.entry.last_engine, again))

    def _show(self, request_id: str, choice: _Choice, released: Released) -> None:
        """Turn one released token into a delta of the client's stream."""
        token_id, engine, finish, logprobs = released
        text = ""
        if token_id is not None:
            self._measure(choice, engine)
            if finish != "stop":  # a stop token has no text
                text = choice.text.push(token_id)
        if finish is not None and not choice.text.stopped:
            text += choice.text.finish()
        if choice.text.stopped:
            if finish is None:
                self._tell_both(Abort(request_id))
            finish = "stop"
        choice.stream.put(
            Delta(
                index=choice.index,
                text=text,
                token_ids=() if token_id is None else (token_id,),
                engine=engine,
                finish_reason=finish,
                logprobs=() if logprobs is None else (logprobs,),
            )
        )
        if finish is not None:
            self._close(request_id, finish)

    def _measure(self, choice: _Choice, engine: EngineName) -> None:
        now = time.monotonic()
        if choice.last_token is None:
            self.metrics.first_token(engine, now - choice.started)
        else:
            self.metrics.next_token(engine, now - choice.last_token)
        choice.last_token = now

    # -- ends ------------------------------------------------------------------------------------

    def _fail(self, request_id: str, error: EngineError) -> None:
        self._choices[request_id].stream.fail(error)
        self._close(request_id, "error")

    def _abort_all(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._choices:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._close(request_id, "abort")
        self._tell_both(Abort(request_id))

    def _tell_both(self, message: Abort) -> None:
        for engine in self._engines:
            self._send(engine, message)

    def _close(self, request_id: str, reason: FinishReason | str) -> None:
        choice = self._choices.pop(request_id)
        self.journal.close(request_id)
        self.metrics.finished(choice.entry.last_engine, reason, time.monotonic() - choice.started)
