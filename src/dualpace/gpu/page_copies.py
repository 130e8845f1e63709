"""Page moves between the pools on streams of their own, beside the steps.

Whole pages, so that a run of consecutive ids is one copy. The caller says what a copy must come
after; what may come after a copy, its event tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualpace.core.errors import EngineError
from dualpace.gpu.kv_pools import KVPools
from dualpace.gpu.strided_copy import copy_rows_to_device


class Run(NamedTuple):
    """Consecutive pages, from the first source on to the first target on."""

    source: int
    target: int
    pages: int


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
            self._check(host_pages, gpu_pages)
            for source, target, count in self._runs(host_pages, gpu_pages, host_pages):
                self._pools["gpu"][target : target + count].copy_(
                    self._pools["host"][source : source + count], non_blocking=True
                )
            return self.mark()

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
            self._check(host_pages, gpu_pages)
            for source, target, count in self._runs(gpu_pages, host_pages, host_pages):
                self._pools["host"][target : target + count].copy_(
                    self._pools["gpu"][source : source + count], non_blocking=True
                )
            return self.mark()

    @staticmethod
    def mark() -> torch.cuda.Event:
        """An event at the end of the current stream, on which a thread waits without spinning."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    @staticmethod
    def steps_follow(event: torch.cuda.Event) -> None:
        """What is launched on the current stream from here on comes after `event`."""
        torch.cuda.current_stream().wait_event(event)

    def loads_follow(self, event: torch.cuda.Event) -> None:
        """What is loaded from here on comes after `event`."""
        self._loads.wait_event(event)

    def loads_follow_stores(self) -> None:
        """What is loaded from here on comes after all stores that have been started."""
        self._loads.wait_stream(self._stores)

    def gather_runs(self, host_pages: Sequence[int]) -> list[Run]:
        """How `load_layer` brings these pages to one place: the same for all layers."""
        return list(self._runs(host_pages, range(len(host_pages)), host_pages))

    def load_layer(
        self,
        layer: int,
        runs: Sequence[Run],
        target: Tensor,
        after: torch.cuda.Event,
        loaded: torch.cuda.Event,
    ) -> None:
        """Start bringing one layer of host pages to the first of `target`, [pages, 2, kv_heads,
        page_tokens, D] on the GPU, once `after` has passed; `loaded` passes at the end. runs: of
        `gather_runs`."""
        host = self._pools["host"]
        source = host.data_ptr() + layer * host.stride(1) * host.itemsize
        pitch, width = host.stride(0) * host.itemsize, host.stride(1) * host.itemsize
        self._loads.wait_event(after)
        for run in runs:
            copy_rows_to_device(
                source + run.source * pitch, pitch,
                target.data_ptr() + run.target * width, width,
                width, run.pages, self._loads,
            )  # fmt: skip
        loaded.record(self._loads)

    def finish_stores(self) -> None:
        """Wait until everything that was to be stored is on the host."""
        self._stores.synchronize()

    def _check(self, host_pages: Sequence[int], gpu_pages: Sequence[int]) -> None:
        """Raises `EngineError` for a page that does not exist."""
        if len(host_pages) != len(gpu_pages):
            raise EngineError(f"{len(host_pages)} host pages for {len(gpu_pages)} of the GPU")
        for name, pool, pages in (
            ("host", self._pools["host"], host_pages),
            ("gpu", self._pools["gpu"], gpu_pages),
        ):
            if any(not 0 <= page < len(pool) for page in pages):
                raise EngineError(f"page outside the {name} pool of {len(pool)}: {list(pages)}")

    def _runs(
        self, sources: Sequence[int], targets: Sequence[int], hosts: Sequence[int]
    ) -> Iterator[Run]:
        """Stretches that are consecutive on both sides and within one piece of the host's pool."""
        first = 0
        for index in range(1, len(sources) + 1):
            ends = index == len(sources) or (
                sources[index] != sources[index - 1] + 1
                or targets[index] != targets[index - 1] + 1
                or hosts[index] % self._piece == 0
            )
            if ends:
                yield Run(sources[first], targets[first], index - first)
                first = index
