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

    def __init__(self, pool: Tensor, piece: int) -> None:
        """pool: [pages, …]; piece: pages to register at once."""
        self._start = pool.data_ptr()
        self._size = pool.numel() * pool.itemsize
        self._piece = piece * pool[0].numel() * pool.itemsize
        self._registered: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register-arena", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Undo it. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        with device_alone("unregistering the arena"):
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)

    def _run(self) -> None:
        started = time.monotonic()
        libc = ctypes.CDLL(None, use_errno=True)
        cudart = torch.cuda.cudart()
        for offset in range(0, self._size, self._piece):
            if self._stop.is_set():
                return
            address, size = self._start + offset, min(self._piece, self._size - offset)
            for advice in (MADV_POPULATE_WRITE, MADV_COLLAPSE):
                libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
            with device_alone("registering a piece of the arena"):
                error = cudart.cudaHostRegister(address, size, 0)
            if int(error) != 0:
                logger.warning(
                    "CUDA registered %s of the %s of host KV, then failed (error %s): "
                    "copies of the rest are slower",
                    format_size(offset), format_size(self._size), int(error),
                )  # fmt: skip
                return
            self._registered.append(address)
        logger.info(
            "registered %s of host KV with CUDA in %.1f s",
            format_size(self._size), time.monotonic() - started,
        )  # fmt: skip
