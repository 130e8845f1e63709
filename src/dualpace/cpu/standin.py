"""The GPU engine's executor on a machine without a GPU: steps and copies by the C++ engine.

Keeps `core.plan.Executor` with two pools, the stand-in's own pages and the host arena, which it
writes prompts into. Knows no scheduler, and nothing of the CPU engine, which is another process
with weights and threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpace.core.errors import EngineError
from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.plan import PENDING, Batch, BatchRow, CopyJob, StepResult, Tier
from dualpace.cpu import _native
from dualpace.cpu.model import CpuModel

Result = TypeVar("Result")


class StandInExecutor:
    """Runs steps and copies in the order of launch, on a thread of its own. A ticket is a `Future`.

    pages: of the stand-in's own pool. arena: the host pool as writable bytes, which must outlive
    the executor, or None without one. page_tokens: tokens per page, of either pool. wake: called,
    from any thread, once a ticket is done.
    """

    def __init__(
        self,
        model: CpuModel,
        pages: int,
        arena: _native.Memory | None,
        page_tokens: int,
        wake: Callable[[], None],
    ) -> None:
        self.gpu_pages = pages
        self._model = model
        self._page_tokens = page_tokens
        self._wake = wake
        size = model.page_bytes(page_tokens)
        own = _native.map_private(pages * size) if pages else np.empty(0, np.uint8)
        host = np.frombuffer(b"" if arena is None else arena, np.uint8)
        self._pools: dict[Tier, NDArray[np.uint8]] = {
            "gpu": own.reshape(-1, size),
            "host": host[: len(host) // size * size].reshape(-1, size),
        }
        self._sampled: dict[str, int] = {}  # by the last step, for rows launched before they knew
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stand-in")

    @property
    def usable_host_pages(self) -> int:
        """All of the arena's pages."""
        return len(self._pools["host"])

    def launch(self, batch: Batch) -> Future[StepResult]:
        """Start a step. The ticket raises `EngineError` for a number that is out of range."""
        return self._submit(partial(self._step, batch))

    def copy(self, job: CopyJob) -> Future[None]:
        """Start a copy. The ticket raises `EngineError` for a page that does not exist."""
        return self._submit(partial(self._copy, job))

    def close(self) -> None:
        """Finish what was launched, and let go of thread, pools and the arena."""
        self._worker.shutdown(wait=True)
        self._pools.clear()

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        future = self._worker.submit(work)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _step(self, batch: Batch) -> StepResult:
        logprobs: dict[int, TokenLogprobs] = {}
        outcome: list[int | None] = [None] * len(batch.rows)
        before, self._sampled = self._sampled, {}  # a step that fails leaves nothing behind
        for tier, pool in self._pools.items():
            places = [i for i, row in enumerate(batch.rows) if row.tier == tier]
            if not places:
                continue
            try:
                rows = [_known(batch.rows[i], before) for i in places]
                done = self._model.step(rows, pool, self._page_tokens)
            except ValueError as error:
                raise EngineError(f"batch {batch.number}, {tier} tier: {error}") from error
            for i, token in zip(places, done.tokens, strict=True):
                outcome[i] = token
            logprobs |= {places[i]: told for i, told in done.logprobs.items()}
        self._sampled = {
            row.request_id: token
            for row, token in zip(batch.rows, outcome, strict=True)
            if token is not None
        }
        return StepResult(outcome, logprobs)

    def _copy(self, job: CopyJob) -> None:
        if job.kind == "land":
            return  # what a step computes for the host is there when it has ended
        source: Tier = "host" if job.kind == "load" else "gpu"
        target: Tier = "gpu" if job.kind == "load" else "host"
        if len(job.source) != len(job.target):
            raise EngineError(f"{len(job.source)} pages cannot fill {len(job.target)}")
        self._check(source, job.source)
        self._check(target, job.target)
        for read, write in zip(job.source, job.target, strict=True):
            self._pools[target][write] = self._pools[source][read]

    def _check(self, tier: Tier, pages: Sequence[int]) -> None:
        size = len(self._pools[tier])
        if any(not 0 <= page < size for page in pages):
            raise EngineError(f"page outside the {tier} pool of {size} pages: {list(pages)}")


def _known(row: BatchRow, sampled: Mapping[str, int]) -> BatchRow:
    """`row` with the token that was pending when it was launched."""
    if row.tokens != [PENDING]:
        return row
    # Where the step before has failed, any token will do: nobody looks at what follows it.
    token = sampled.get(row.request_id, 0)
    history = row.history and row.history.with_output(token)
    return msgspec.structs.replace(row, tokens=[token], history=history)
