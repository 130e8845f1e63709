"""Page moves between the pools on streams of their own, beside the steps.

Whole pages, so that a run of consecutive ids is one copy. The caller says what a copy must come
after; what may come after a copy, its event tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dualpace.core.errors import EngineError
from dualpace.gpu.kv_pools import KVPools


class PageCopies:
    """Loads (host to GPU) and stores (GPU to host) in the order in which they are started."""

    def __init__(self, pools: KVPools, piece: int) -> None:
        """piece: pages of the host's pool that are registered with CUDA at once. A copy must not
        reach from one piece into the next, which CUDA may refuse."""
        self._pools = pools
        self._piece = piece
        self._loads = torch.cuda.Stream()
        self._stores = torch.cuda.Stream()

    def load(self, host_pages: Sequence[int], gpu_pages: Sequence[int]) -> torch.cuda.Event:
        """Start bringing host pages to the GPU. No step under way may touch the GPU's pages."""
        with torch.cuda.stream(self._loads):
            for source, target, count in self._runs("host", host_pages, "gpu", gpu_pages):
                self._pools["gpu"][target : target + count].copy_(
                    self._pools["host"][source : source + count], non_blocking=True
                )
            return _mark()

    def store(
        self,
        gpu_pages: Sequence[int],
        host_pages: Sequence[int],
        after: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        """Start taking GPU pages to the host, once `after` has passed, which comes after the steps
        that write them; None where these have ended."""
        with torch.cuda.stream(self._stores):
            if after is not None:
                self._stores.wait_event(after)
            for source, target, count in self._runs("gpu", gpu_pages, "host", host_pages):
                self._pools["host"][target : target + count].copy_(
                    self._pools["gpu"][source : source + count], non_blocking=True
                )
            return _mark()

    def finish_stores(self) -> None:
        """Wait until everything that was to be stored is on the host."""
        self._stores.synchronize()

    def _runs(
        self, source: str, sources: Sequence[int], target: str, targets: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """(first source, first target, pages) of stretches that are consecutive on both sides.

        Raises `EngineError` for a page that does not exist.
        """
        if len(sources) != len(targets):
            raise EngineError(f"{len(sources)} pages cannot fill {len(targets)}")
        for tier, pages in ((source, sources), (target, targets)):
            size = len(self._pools["gpu" if tier == "gpu" else "host"])
            if any(not 0 <= page < size for page in pages):
                raise EngineError(f"page outside the {tier} pool of {size} pages: {list(pages)}")
        first = 0
        hosts = sources if source == "host" else targets
        for index in range(1, len(sources) + 1):
            ends = index == len(sources) or (
                sources[index] != sources[index - 1] + 1
                or targets[index] != targets[index - 1] + 1
                or hosts[index] % self._piece == 0
            )
            if ends:
                yield sources[first], targets[first], index - first
                first = index


def _mark() -> torch.cuda.Event:
    """An event at the end of the current stream, on which a thread can wait without spinning."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
