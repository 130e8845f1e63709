"""The CPU engine's executor: batches of the loop, run by the C++ engine on a thread of their own.

Knows the contract of `core.plan` and the arena's address; does not schedule and allocates no pages.
The arena's memory is prepared in the background, ahead of the highest page that a batch has named.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from dualpace.core.errors import EngineError
from dualpace.core.plan import Batch, CopyJob, StepResult, Ticket
from dualpace.cpu import _native
from dualpace.cpu.memory import ArenaPreparer
from dualpace.cpu.model import CpuModel


class CpuExecutor:
    """Runs decode iterations in the order of launch.

    arena: the host KV pool as writable bytes; it must outlive the executor. page_tokens: tokens per
    page. wake: called, from any thread, once a ticket is done.
    """

    def __init__(
        self,
        model: CpuModel,
        arena: _native.Memory,
        page_tokens: int,
        wake: Callable[[], None],
    ) -> None:
        self._model = model
        self._arena = arena
        self._page_tokens = page_tokens
        self._wake = wake
        self._page_bytes = model.page_bytes(page_tokens)
        self._preparer = ArenaPreparer(
            lambda offset, length: model.prepare_arena(arena, offset, length),
            np.frombuffer(arena, np.uint8).nbytes,
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dualpace-cpu")

    def launch(self, batch: Batch) -> Ticket[StepResult]:
        """Start an iteration, or the host's part of a gated step. Every row has one token and lives
        on the host.

        The ticket yields a token id per row, None where `sample` is not set and for all of a gated
        step, whose tokens are the GPU engine's, and raises
        `EngineError` if a row names a token, position or page that does not exist, `AssistError` if
        the GPU engine has not done its part.
        """
        future: Future[StepResult] = self._worker.submit(self._run, batch)
        future.add_done_callback(lambda _: self._wake())
        return future

    def prepare(self) -> None:
        """Give the whole arena its memory now, for measurements that preparing would disturb."""
        self._preparer.use(np.frombuffer(self._arena, np.uint8).nbytes)
        self._preparer.wait()

    def read_seconds(self, size: int) -> float:
        """Seconds in which the engine's threads read the arena's first `size` bytes, nothing else
        done; between iterations."""
        memory = np.frombuffer(self._arena, np.uint8, size)
        return self._worker.submit(self._model.read_seconds, memory).result()

    def copy(self, job: CopyJob) -> Ticket[None]:
        """Raises `EngineError`: pages are moved by the engine that owns the GPU."""
        raise EngineError(f"the CPU engine copies no pages (copy {job.number})")

    def close(self) -> None:
        """Wait for what runs, and let the threads go."""
        self._worker.shutdown(wait=True)
        self._preparer.close()

    def _run(self, batch: Batch) -> StepResult:
        if any(row.tier != "host" for row in batch.rows):
            raise EngineError(f"batch {batch.number}: the CPU engine decodes host rows only")
        highest = max((page for row in batch.rows for page in row.pages), default=0)
        self._preparer.use((highest + 1) * self._page_bytes)
        try:
            if batch.second_half is not None:
                self._model.attend(batch.number, batch.halves, self._arena, self._page_tokens)
                return StepResult([None] * len(batch.rows))
            decoded = self._model.decode(
                batch.rows, self._arena, self._page_tokens, route=batch.route
            )
        except ValueError as error:
            raise EngineError(f"batch {batch.number}: {error}") from error
        token_ids: list[int] = decoded.token_ids.tolist()
        tokens = [
            token if row.sample else None for row, token in zip(batch.rows, token_ids, strict=True)
        ]
        return StepResult(tokens, decoded.logprobs)
