"""Python's garbage collector, kept away from what a long-lived process has built at its start."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


def freeze_heap() -> None:
    """What is alive now is taken to live for good: later collections pass over it.

    Libraries and a model leave a million objects behind, and looking at them all takes a tenth of a
    second in which nothing else runs.
    """
    gc.collect()
    gc.freeze()
    # What is frozen then is not freed when Python ends, and extension modules call it leaked.
    atexit.register(gc.unfreeze)


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Collections pass over what is alive now for as long as the context is open: what a benchmark
    has prepared is no part of what it measures. Not to be nested, nor in a process that has called
    `freeze_heap`: the end of one is the end of all."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
