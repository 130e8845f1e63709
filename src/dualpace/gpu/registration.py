"""Makes the host arena known to CUDA, piece by piece, while the engine already serves.

Only registered ("pinned") memory is copied asynchronously and at the link's full rate; a copy from
or to what is not registered yet is made by the driver, slower and right. Each piece first gets
2 MiB pages where the kernel gives them, because pinned pages can no longer be joined.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from dualpace.core.config import format_size
from dualpace.gpu.gate import device_alone

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 * 2**20  # takes some tens of milliseconds
HOLD_SECONDS = 0.2  # for which assisted iterations may be kept waiting
HUGE_PAGE = 2 * 2**20
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25


class Registration:
    """Of the host's pages, from the first on: one thread prepares memory, another registers it."""

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
        self._prepared: SimpleQueue[Tensor | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._prepare, name="prepare-arena", daemon=True),
            threading.Thread(target=self._run, name="register-arena", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Undo it. No copy may be under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._undo()

    def _run(self) -> None:
        started = time.monotonic()
        while (part := self._prepared.get()) is not None:
            with device_alone("registering a part of the arena"):
                error = self._register_some(part)
            if error:
                logger.warning(
                    "CUDA registered %d of the %d pages of host KV, then failed (error %d): "
                    "copies of the others are slower",
                    self.pages, len(self._pool), error,
                )  # fmt: skip
                self._stop.set()
                self._tell(len(self._pool))
                return
        if self.pages == len(self._pool):
            logger.info(
                "registered %s of host KV with CUDA in %.1f s",
                format_size(self._pool.numel() * self._pool.itemsize), time.monotonic() - started,
            )  # fmt: skip

    def _register_some(self, part: Tensor) -> int:
        """`part`, and what else has been prepared while the gate was shut; CUDA's error code."""
        held = time.monotonic()
        while True:
            address = part.data_ptr()
            error = int(torch.cuda.cudart().cudaHostRegister(address, _size(part), 0))
            if error:
                return error
            self._registered.append(address)
            self._tell(self.pages + len(part))
            if self._prepared.empty() or time.monotonic() - held > HOLD_SECONDS:
                return 0
            following = self._prepared.get()
            if following is None:
                self._prepared.put(None)
                return 0
            part = following

    def _prepare(self) -> None:
        """Give piece after piece its memory, and pass it on; None at the end."""
        for first in range(0, len(self._pool), self._piece):
            if self._stop.is_set():
                break
            part = self._pool[first : first + self._piece]
            give_memory(part.data_ptr(), _size(part))
            self._prepared.put(part)
        self._prepared.put(None)

    def _tell(self, pages: int) -> None:
        self.pages = pages
        self._progressed()


def give_memory(address: int, size: int) -> None:
    """Back a shared mapping with memory, in 2 MiB pages where the kernel gives them; what is in it
    already stays.

    The kernel joins pages only where there is a page table, so one small page comes first. To fill
    the rest with small ones, too, and have these joined takes many times as long; but some kernels
    join only what is there in full.
    """
    libc = ctypes.CDLL(None)

    def advise(begin: int, length: int, advice: int) -> bool:
        """False where the kernel refuses."""
        return not libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)

    first, last = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + size) // HUGE_PAGE * HUGE_PAGE
    for unit in range(first, last, HUGE_PAGE):
        advise(unit, mmap.PAGESIZE, MADV_POPULATE_WRITE)
        if not advise(unit, HUGE_PAGE, MADV_COLLAPSE):
            advise(unit, HUGE_PAGE, MADV_POPULATE_WRITE)
            advise(unit, HUGE_PAGE, MADV_COLLAPSE)
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    advise(begin, address + size - begin, MADV_POPULATE_WRITE)


def _size(part: Tensor) -> int:
    """Bytes."""
    return int(part.numel() * part.itemsize)


def _unregister(addresses: list[int], pool: Tensor) -> None:
    """pool: kept alive until its memory is not registered any more."""
    with device_alone("unregistering the arena"):
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)
