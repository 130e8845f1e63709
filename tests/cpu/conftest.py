"""Engines of every instruction set here, software tiles too, with one thread and with two."""

from __future__ import annotations

import os

import pytest

from dualpace.cpu import _native

ISAS = [*_native.supported_isas(), "amx_emulated"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        cores = sorted(os.sched_getaffinity(0))
        cases = [(isa, n) for isa in ISAS for n in (1, 2) if n <= len(cores)]
        metafunc.parametrize("engine", cases, indirect=True, ids=[f"{i}-{n}" for i, n in cases])


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> _native.Engine:
    isa, threads = request.param
    return _native.Engine(sorted(os.sched_getaffinity(0))[:threads], isa)
