"""Sockets between the processes: one inbox each, one outbox per peer, over ZeroMQ ipc.

Knows envelopes, not what they mean. A send never blocks and never fails because the peer is dead:
what a dead process should have read is of no use to anybody.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from dualpace.core.errors import HardwareError
from dualpace.core.messages import CPU, FRONTEND, AnyMessage, Envelope, PeerDown, PeerUp


class Port(Protocol):
    """What the engine loop needs of its surroundings."""

    def send(self, to: str, body: AnyMessage) -> None: ...

    def drain(self) -> list[Envelope]:
        """All messages that have arrived, oldest first, without waiting."""
        ...

    def wait(self, timeout: float) -> bool:
        """True once a message has arrived or `wake` was called, False after `timeout` seconds."""
        ...


class _Outboxes:
    """Sending half: PUSH sockets by peer name."""

    def __init__(self, name: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.name = name
        self.generation = 0
        self._context = context
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def connect(self, peer: str, address: str) -> None:
        """Send to `peer` at `address` from now on, in place of where it was before."""
        self.disconnect(peer)
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.linger = 0
        socket.connect(address)
        self._peers[peer] = socket

    def disconnect(self, peer: str) -> None:
        socket = self._peers.pop(peer, None)
        if socket is not None:
            socket.close()

    def send(self, to: str, body: AnyMessage) -> None:
        """Queue a message; to a peer that is not connected it is dropped."""
        socket = self._peers.get(to)
        if socket is not None:
            socket.send(self._encode(Envelope(self.name, self.generation, body)))

    def flush_and_close(self) -> None:
        """Give what was queued a second to leave, then let go."""
        for socket in self._peers.values():
            socket.close(linger=1000)
        self._peers.clear()


class EnginePort(_Outboxes):
    """A port for a loop that waits: implements `Port`. Only `wake` may be called from elsewhere.

    Follows the CPU engine from one incarnation to the next, and drops what the other engine sent
    when it spoke of an earlier one.
    """

    def __init__(self, name: str, address: str) -> None:
        self._zmq = zmq.Context()
        super().__init__(name, self._zmq)
        self._inbox = self._zmq.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        _listen(self._inbox, address, self._zmq)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(Envelope).decode

    def drain(self) -> list[Envelope]:
        envelopes: list[Envelope] = []
        while True:
            try:
                envelope = self._decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return envelopes
            body = envelope.body
            if isinstance(body, PeerUp):
                self.generation = body.generation
                self.connect(CPU, body.address)
            elif isinstance(body, PeerDown):
                self.disconnect(CPU)
                self.generation = body.generation + 1  # the dead one's last messages are stale
            if envelope.sender == FRONTEND or envelope.generation == self.generation:
                envelopes.append(envelope)

    def wait(self, timeout: float) -> bool:
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return bool(ready)

    def wake(self) -> None:
        """End the current or next `wait`. Safe from any thread."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self.flush_and_close()
        self._inbox.close(linger=0)
        self._zmq.term()
        os.close(self._wake)


class AsyncPort(_Outboxes):
    """A port for an asyncio program."""

    def __init__(self, name: str, address: str) -> None:
        self._zmq = zmq.Context()
        super().__init__(name, self._zmq)
        self._async_zmq = zmq.asyncio.Context(self._zmq)
        self._inbox = self._async_zmq.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        _listen(self._inbox, address, self._zmq)
        self._decode = msgspec.msgpack.Decoder(Envelope).decode

    async def envelopes(self) -> AsyncIterator[Envelope]:
        """Messages as they arrive, for ever."""
        while True:
            yield self._decode(await self._inbox.recv())

    def close(self) -> None:
        self.flush_and_close()
        self._inbox.close(linger=0)
        self._zmq.term()


def _listen(inbox: zmq.Socket[Any], address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Raises `HardwareError` where there can be no socket; then nothing is left of it."""
    try:
        inbox.bind(address)
    except zmq.ZMQError as error:
        inbox.close()
        context.term()
        raise HardwareError(
            f"cannot listen at {address}: {zmq.strerror(error.errno or 0)} (TMPDIR says where)"
        ) from None
