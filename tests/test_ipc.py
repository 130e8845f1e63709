"""Ports: who hears whom, before and after the CPU engine's death."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpace.core.messages import CPU, FRONTEND, GPU, Abort, Gone, PeerDown, PeerUp
from dualpace.ipc import EnginePort


class Ports:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: list[EnginePort] = []

    def open(self, name: str, generation: int = 1) -> EnginePort:
        port = EnginePort(name, self.address(name, generation))
        port.generation = generation
        self.ports.append(port)
        return port

    def address(self, name: str, generation: int = 1) -> str:
        return f"ipc://{self.folder}/{name}-{generation}"


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[Ports]:
    made = Ports(tmp_path)
    yield made
    for port in made.ports:
        port.close()


def heard(port: EnginePort, count: int) -> list[object]:
    bodies: list[object] = []
    while len(bodies) < count:
        assert port.wait(5.0), f"only {bodies} arrived"
        bodies += [envelope.body for envelope in port.drain()]
    return bodies


def test_messages_keep_their_order_and_wake_the_waiter(ports: Ports) -> None:
    gpu, frontend = ports.open(GPU), ports.open(FRONTEND)
    frontend.connect(GPU, ports.address(GPU))
    sent = [Abort(str(i)) for i in range(1000)]
    for message in sent:
        frontend.send(GPU, message)
    assert heard(gpu, 1000) == sent
    assert not gpu.wait(0.01)
    gpu.wake()
    assert gpu.wait(5.0)


def test_what_a_dead_cpu_engine_sent_is_dropped_and_its_successor_is_heard(ports: Ports) -> None:
    gpu, frontend = ports.open(GPU), ports.open(FRONTEND)
    frontend.connect(GPU, ports.address(GPU))
    engines = [ports.open(CPU, generation) for generation in (1, 2)]
    for engine in engines:
        engine.connect(GPU, ports.address(GPU))
    frontend.send(GPU, PeerUp(1, ports.address(CPU, 1), 8))
    heard(gpu, 1)
    engines[0].send(GPU, Gone("a", 0))
    assert heard(gpu, 1) == [Gone("a", 0)]
    frontend.send(GPU, PeerDown(1))
    heard(gpu, 1)
    engines[0].send(GPU, Gone("late", 0))
    frontend.send(GPU, PeerUp(2, ports.address(CPU, 2), 8))
    heard(gpu, 1)
    engines[0].send(GPU, Gone("later", 0))
    engines[1].send(GPU, Gone("b", 0))
    assert heard(gpu, 1) == [Gone("b", 0)]
    gpu.send(CPU, Gone("c", 0))
    assert heard(engines[1], 1) == [Gone("c", 0)]


def test_sending_to_nobody_is_harmless(ports: Ports) -> None:
    ports.open(GPU).send(CPU, Gone("a", 0))
