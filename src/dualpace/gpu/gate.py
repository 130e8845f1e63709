"""The one gate for what stops or waits for the whole device.

Synchronising the device, capturing graphs, allocating pools, emptying the allocator's cache and
registering memory wait for, or disturb, every stream of the process. They happen one at a time and
only in here, so that whoever must not be disturbed has one place to say so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

_alone = threading.RLock()


@contextmanager
def device_alone(purpose: str) -> Iterator[None]:
    """Hold the device for `purpose`."""
    started = time.monotonic()
    with _alone:
        yield
    logger.debug("%s: %.3f s", purpose, time.monotonic() - started)


def synchronize() -> None:
    """Wait for all work of all streams."""
    with device_alone("synchronising the device"):
        torch.cuda.synchronize()


def release_cache() -> None:
    """Give memory that no tensor uses back to the device."""
    with device_alone("emptying the allocator's cache"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
