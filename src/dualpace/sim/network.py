"""Ports in memory, with delays: messages between two processes keep their order, as on sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dualpace.core.messages import FRONTEND, AnyMessage, Envelope
from dualpace.sim.clock import VirtualClock

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


class SimulatedPort:
    """Implements `ipc.Port`. `on_arrival` is called after each message has reached the inbox."""

    def __init__(self, network: Network, name: str, on_arrival: Callable[[], None]) -> None:
        self.name = name
        self.on_arrival = on_arrival
        self.inbox: list[Envelope] = []
        self._network = network

    def send(self, to: str, body: AnyMessage) -> None:
        self._network.send(self.name, to, body)

    def drain(self) -> list[Envelope]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def wait(self, timeout: float) -> bool:
        """Returns at once: virtual time passes only between events."""
        return True


class Network:
    """Delivers messages by name. `delay(sender, to)` gives each one's travel time in seconds.

    `fate(sender, to, body)` may lose a message (an empty answer) or double it: each further copy
    arrives so many seconds after the first, whatever has been sent meanwhile.
    """

    def __init__(
        self,
        clock: VirtualClock,
        delay: Callable[[str, str], float],
        fate: Callable[[str, str, AnyMessage], Sequence[float]] = lambda sender, to, body: (0.0,),
    ) -> None:
        self._clock = clock
        self._delay = delay
        self._fate = fate
        self._ports: dict[str, SimulatedPort] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}
        self.generation = 1

    def port(self, name: str, on_arrival: Callable[[], None]) -> SimulatedPort:
        """A new port; it replaces an older one of that name, whose mail is lost."""
        port = SimulatedPort(self, name, on_arrival)
        self._ports[name] = port
        return port

    def send(self, sender: str, to: str, body: AnyMessage) -> None:
        copies = self._fate(sender, to, body)
        if not copies:
            return
        # Encoded as it would be on a socket: sender and receiver share no object.
        data = _encode(Envelope(sender, self.generation, body))
        source, target = self._ports[sender], self._ports[to]
        arrival = max(
            self._clock.now + self._delay(sender, to), self._last_arrival.get((sender, to), 0.0)
        )
        self._last_arrival[sender, to] = arrival

        def deliver() -> None:
            envelope = _decode(data)
            stale = FRONTEND not in (sender, to) and envelope.generation != self.generation
            # What has not arrived when its sender dies is lost with it.
            alive = self._ports[sender] is source and self._ports[to] is target
            if alive and not stale:
                target.inbox.append(envelope)
                target.on_arrival()

        self._clock.at(arrival, deliver)
        for late in copies[1:]:
            self._clock.at(arrival + late, deliver)
