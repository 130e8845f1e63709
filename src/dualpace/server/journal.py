"""The journal: prompt and every token received of each live request, so that no crash loses one.

Both engines' token events come in here, late, early or twice, and leave in order and once. It knows
nothing of text, clients or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import EngineName, Submit, TokenEvent
from dualpace.core.request import FinishReason, RequestState


class Released(NamedTuple):
    """The next token in order, or, where `token_id` is None, an end that came without one."""

    token_id: int | None
    engine: EngineName
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class JournalEntry:
    """One live request. `state` holds the tokens released so far, and only those."""

    state: RequestState
    min_epoch: int
    last_engine: EngineName = "gpu"
    _early: dict[int, tuple[TokenEvent, EngineName]] = field(default_factory=dict)
    _end: tuple[int, FinishReason] | None = None  # number of tokens it ends with, and why

    def receive(self, event: TokenEvent, engine: EngineName) -> None:
        """Note an event; `release` says what it made known."""
        if event.epoch < self.min_epoch:
            return
        if event.index >= len(self.state.output):
            self._early.setdefault(event.index, (event, engine))
        if event.finish is not None and self._end is None:
            self._end = (event.index + 1, event.finish)

    def release(self) -> Released | None:
        """The next token if it is there, with the finish reason if it is the last one."""
        count = len(self.state.output)
        if self._end is not None and count >= self._end[0]:
            return Released(None, self.last_engine, self._end[1])
        early = self._early.pop(count, None)
        if early is None:
            return None
        event, engine = early
        self.state.append(event.token_id, event.logprobs)
        self.last_engine = engine
        ended = self._end is not None and count + 1 == self._end[0]
        finish = self._end[1] if ended and self._end else None
        return Released(event.token_id, engine, finish, event.logprobs)

    def restart(self, epoch: int) -> None:
        """Forget what came out of order and refuse whatever is older than `epoch`."""
        self.min_epoch = epoch
        self.state.epoch = epoch
        self._early.clear()
        self._end = None


class Journal:
    """The live requests by id."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def open(self, state: RequestState) -> Submit:
        """A new live request, and the message that hands it to the GPU engine."""
        assert state.id not in self._entries, f"request {state.id} is already live"
        self._entries[state.id] = JournalEntry(state, min_epoch=state.epoch)
        return _submit(state)

    def get(self, request_id: str) -> JournalEntry | None:
        return self._entries.get(request_id)

    def close(self, request_id: str) -> None:
        """The request has ended, however it did."""
        self._entries.pop(request_id, None)

    def resubmit(self, request_id: str, epoch: int) -> Submit | FinishReason | None:
        """What becomes of a request that an engine lost.

        A `Submit` with the tokens received so far, or the reason why those already end it, or None
        where it is not live or has been resubmitted at a later epoch.
        """
        entry = self._entries.get(request_id)
        if entry is None or epoch < entry.min_epoch:
            return None
        entry.restart(epoch)
        return entry.state.finish_reason or _submit(entry.state)


def _submit(state: RequestState) -> Submit:
    # An engine in this process would grow the very lists that the journal grows.
    own = {"output": list(state.output), "logprobs": list(state.logprobs)}
    return Submit(msgspec.structs.replace(state, **own))
