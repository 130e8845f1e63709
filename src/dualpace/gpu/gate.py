"""The one gate for what stops or waits for the whole device.

Synchronising the device, capturing graphs, allocating pools, emptying the allocator's cache and
registering memory wait for, or disturb, every stream of the process. They happen one at a time and
only in here. Work whose end depends on another process, which they would wait for with the driver
locked, enters by `start_waiting_work` and keeps them out meanwhile.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

_alone = threading.RLock()
_changed = threading.Condition()
_waiting_work = 0  # pieces of work that wait for another process
_wanted = 0  # who holds the device or wants to
_starting = 0  # pieces of such work that are kept waiting
_depth = 0  # how often the thread that holds the device has entered
_their_turn = False  # it was held while they waited: they come before whoever wants it next


@contextmanager
def device_alone(purpose: str) -> Iterator[None]:
    """Hold the device for `purpose`, once no work on it waits for another process."""
    global _wanted, _depth, _their_turn
    started = time.monotonic()
    with _changed:
        _wanted += 1
    try:
        with _alone:
            with _changed:
                _changed.wait_for(lambda: not _waiting_work and (_depth or not _their_turn))
                _depth += 1
            try:
                yield
            finally:
                with _changed:
                    _depth -= 1
                    _their_turn = not _depth and _starting > 0
    finally:
        with _changed:
            _wanted -= 1
            _changed.notify_all()
    logger.debug("%s: %.3f s", purpose, time.monotonic() - started)


@contextmanager
def capturing(purpose: str) -> Iterator[None]:
    """Hold the device to capture graphs. What is garbage goes before, and none is collected until
    the end: freeing a graph or memory of the device would break the capture."""
    with device_alone(purpose):
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def start_waiting_work() -> None:
    """Before work is launched that waits for another process; blocks while the device is held.

    Where there is such work already this is more of the same, which may be needed for its end, and
    is let in at once. Nobody holds the device twice while it waits. Not to be called while holding
    the device.
    """
    global _waiting_work, _starting, _their_turn
    with _changed:
        _starting += 1
        _changed.wait_for(lambda: _waiting_work or _their_turn or not _wanted)
        _starting -= 1
        _their_turn = False
        _waiting_work += 1


def end_waiting_work() -> None:
    """After it has ended, once for each start."""
    global _waiting_work
    with _changed:
        _waiting_work -= 1
        _changed.notify_all()


def synchronize() -> None:
    """Wait for all work of all streams."""
    with device_alone("synchronising the device"):
        torch.cuda.synchronize()


def release_cache() -> None:
    """Give memory that no tensor uses back to the device."""
    with device_alone("emptying the allocator's cache"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
