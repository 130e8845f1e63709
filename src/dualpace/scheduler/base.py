"""What both engines' schedulers share: outbox, endings, statistics.

A scheduler owns its engine's requests and pages and speaks the protocol of `core.messages`. It
never waits and never computes; `dualpace.loop` drives it.
"""

from __future__ import annotations

import abc
import logging
from collections import Counter
from collections.abc import Iterable

from dualpace.core.messages import (
    FRONTEND,
    Abort,
    AnyMessage,
    EngineName,
    EngineStats,
    Envelope,
    Gone,
    Shutdown,
    TokenEvent,
    Tokens,
)
from dualpace.core.plan import CopyJob
from dualpace.kv.pages import BlockTable, PagePool

logger = logging.getLogger(__name__)
STATS_INTERVAL = 0.5  # seconds between EngineStats
ANY_EPOCH = 2**62


class SchedulerBase(abc.ABC):
    """Outbox and the ending of requests.

    A request that ends here is told to the peer with `Gone`. What the peer had sent about it before
    finds no row on arrival and is dropped; its `Gone` in return frees what is kept for it here.
    """

    def __init__(self, peer: EngineName, pool: PagePool) -> None:
        self.stopped = False
        self.peer = peer
        self.pool = pool
        self.steps = 0
        self.moves: Counter[str] = Counter()
        self._outbox: list[tuple[str, AnyMessage]] = []
        self._events: list[TokenEvent] = []
        self._stats_due = 0.0
        self._dropped_kinds: set[str] = set()
        self._step_tables: dict[int, list[BlockTable]] = {}

    # -- the loop's side -------------------------------------------------------------------------

    def on_message(self, envelope: Envelope) -> None:
        body = envelope.body
        match body:
            case Abort():
                self.on_end(body.request_id, ANY_EPOCH)
            case Gone():
                self.on_peer_end(body.request_id, body.last_epoch)
                self.on_end(body.request_id, body.last_epoch)
            case Shutdown():
                self.stopped = True
            case _:
                self.handle(body)

    def take_messages(self) -> list[tuple[str, AnyMessage]]:
        messages, self._outbox = self._outbox, []
        if self._events:
            # First of all: when the peer hears that a request is gone, its last token has left.
            messages.insert(0, (FRONTEND, Tokens(self._events)))
            self._events = []
        return messages

    def take_copies(self) -> list[CopyJob]:
        return []

    def idle(self) -> None:
        self.check_integrity()

    # -- for the engines -------------------------------------------------------------------------

    @abc.abstractmethod
    def handle(self, body: AnyMessage) -> None:
        """Messages that only this engine gets."""

    @abc.abstractmethod
    def on_end(self, request_id: str, last_epoch: int) -> None:
        """The request has ended elsewhere: let go of everything of it up to that epoch."""

    @abc.abstractmethod
    def on_peer_end(self, request_id: str, last_epoch: int) -> None:
        """The peer has ended the request and touches no pages of it any more."""

    def drop(self, body: AnyMessage) -> None:
        """A message that came late, twice, or for nobody. It changes nothing here."""
        kind = type(body).__name__
        level = logging.DEBUG if kind in self._dropped_kinds else logging.INFO
        self._dropped_kinds.add(kind)
        logger.log(level, "dropped, as nothing here waits for it: %s", kind)
        self.moves["dropped"] += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if what is owned does not add up."""
        self.pool.check_integrity()

    def send(self, to: str, body: AnyMessage) -> None:
        self._outbox.append((to, body))

    def emit_token(self, event: TokenEvent) -> None:
        self._events.append(event)

    def tell_gone(self, request_id: str, epoch: int) -> None:
        """Tell the peer that the request, which had this epoch, ended here."""
        self.send(self.peer, Gone(request_id, epoch + 1))  # it may be one ahead with a Release

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """Of the pages that are owned here."""
        return (self.pool,)

    @property
    def steps_under_way(self) -> int:
        return len(self._step_tables)

    def hold_for_step(self, number: int, tables: Iterable[BlockTable]) -> None:
        """The step now launched names these tables: their pages stay until it has ended."""
        held = list(tables)
        for table in held:
            self.pool.hold(table)
        self._step_tables[number] = held

    def step_ended(self, number: int) -> None:
        for table in self._step_tables.pop(number):
            self.pool.drop(table)

    def report_stats(self, now: float, rows: int, waiting: int) -> None:
        if now < self._stats_due:
            return
        self._stats_due = now + STATS_INTERVAL
        total, free = sum(pool.total for pool in self.pools), sum(pool.free for pool in self.pools)
        stats = EngineStats(self.steps, rows, waiting, total, free, dict(self.moves))
        self.send(FRONTEND, stats)
