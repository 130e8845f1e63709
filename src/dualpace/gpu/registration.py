"""Makes the host arena known to CUDA, piece by piece, while the engine already serves.

Only registered ("pinned") memory is copied asynchronously and at the link's full rate; a copy from
or to what is not registered yet is made by the driver, slower and right. Each piece first gets
2 MiB pages where the kernel gives them, because pinned pages can no longer be joined.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from dualpace.core.config import format_size
from dualpace.gpu.gate import device_alone

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 * 2**20  # takes some tens of milliseconds
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25


class Registration:
    """Of the host's pages, from the first on, by a thread of its own."""

    def __init__(self, pool: Tensor, piece: int, progressed: Callable[[], None]) -> None:
        """pool: [pages, …]; piece: pages to register at once; progressed: called after each."""
        self.pages = 0  # from the first on, that can be copied
        self._pool = pool
        self._piece = piece
        self._progressed = progressed
        self._registered: list[int] = []
        # Memory that stays registered after its end would haunt whatever is mapped there next.
        self._undo = weakref.finalize(self, _unregister, self._registered, pool)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register-arena", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Undo it. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        self._undo()

    def _run(self) -> None:
        started = time.monotonic()
        for first in range(0, len(self._pool), self._piece):
            if self._stop.is_set():
                return
            error = self._register(self._pool[first : first + self._piece])
            if error:
                logger.warning(
                    "CUDA registered %d of the %d pages of host KV, then failed (error %d): "
                    "copies of the others are slower",
                    first, len(self._pool), error,
                )  # fmt: skip
                break
            self.pages = min(first + self._piece, len(self._pool))
            self._progressed()
        else:
            logger.info(
                "registered %s of host KV with CUDA in %.1f s",
                format_size(self._pool.numel() * self._pool.itemsize), time.monotonic() - started,
            )  # fmt: skip
        self.pages = len(self._pool)
        self._progressed()

    def _register(self, part: Tensor) -> int:
        """CUDA's error code, 0 if all is well."""
        address, size = part.data_ptr(), part.numel() * part.itemsize
        libc = ctypes.CDLL(None)
        for advice in (MADV_POPULATE_WRITE, MADV_COLLAPSE):  # where refused, pages are small
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
        with device_alone("registering a piece of the arena"):
            error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if not error:
            self._registered.append(address)
        return error


def _unregister(addresses: list[int], pool: Tensor) -> None:
    """pool: kept alive until its memory is not registered any more."""
    with device_alone("unregistering the arena"):
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)
