"""One client's output, between the frontend that fills it and the handler that empties it.

Filling never waits, so a slow client holds up nobody; what piles up is bounded by the request's
`max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import EngineName
from dualpace.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token event added to one choice.

    `text` may be empty (half a character, or what could become a stop string). The last delta of a
    choice carries its `finish_reason`, and no token where the choice ended without another one.
    `logprobs` are there for each token where the request asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    engine: EngineName
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


def merge(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one, by the name of the engine that made the last of it."""
    return Delta(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        engine=deltas[-1].engine,
        finish_reason=deltas[-1].finish_reason,
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
    )


class Stream:
    """Deltas of all choices of one client request, in the order in which they came."""

    def __init__(self, choices: int, on_close: Callable[[], None]) -> None:
        self._open_choices = choices
        self._on_close = on_close
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True once nothing more will be put in."""
        return self._error is not None or self._open_choices == 0

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._open_choices -= 1
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the stream: `take` raises `error` once what came before it is taken."""
        self._error = self._error or error
        self._news.set()

    async def take(self) -> list[Delta]:
        """All deltas that wait, at least one; an empty list at the end. Raises what `fail` gave."""
        while not self._deltas and not self.ended:
            self._news.clear()
            await self._news.wait()
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    def close(self) -> None:
        """The client is served or has left: whatever still runs for it is aborted."""
        self._on_close()
