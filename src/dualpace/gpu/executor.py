"""The GPU engine's executor: one worker thread that runs steps and page copies in order.

Knows a thread and futures; what a step does is the runner's, what to run is decided by whoever
launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from dualpace.core.config import EngineConfig
from dualpace.core.errors import EngineError, FatalEngineError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Batch, CopyJob
from dualpace.gpu.runner import ModelRunner
from dualpace.models.tensors import Weight

Result = TypeVar("Result")


class TorchExecutor:
    """`core.plan.Executor` on torch, for CUDA or the CPU stand-in. A ticket is a `Future`.

    A step or copy that raises fails its own ticket and nothing else.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Iterable[tuple[str, Weight]],
        *,
        arena: Any | None,
        wake: Callable[[], None],
    ) -> None:
        """Load the weights and set up both pools; returns when the first batch can be launched.

        weights: as from `models.weights.iter_weights`, in `config.dtype`; arena: writable buffer
        (an mmap) of at least host_pages × page_bytes, or None without host pages; wake: called
        after each finished ticket, from the worker thread or the launching one. Raises
        `HardwareError` where the device has no room for KV, `EngineError` for a short arena.
        """
        self._wake = wake
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-executor")
        try:
            # On the worker, because torch keeps the number of threads for each thread apart.
            if config.device == "cpu":
                self._worker.submit(torch.set_num_threads, config.gpu_threads).result()
            self._runner: ModelRunner | None = self._worker.submit(
                _without_gradients, partial(ModelRunner, config, spec, weights, arena)
            ).result()
        except BaseException:
            self._worker.shutdown()
            raise

    @property
    def gpu_pages(self) -> int:
        """Pages of the GPU pool, measured where the config left it open."""
        return self._open_runner().gpu_pages

    def launch(self, batch: Batch) -> Future[list[int | None]]:
        """Start a step after everything launched before it."""
        return self._submit(partial(self._open_runner().step, batch))

    def copy(self, job: CopyJob) -> Future[None]:
        """Start a copy after everything launched before it."""
        return self._submit(partial(self._open_runner().copy, job))

    def close(self) -> None:
        """Finish what was launched, then let go of thread, weights, pools and the arena."""
        self._worker.shutdown(wait=True)
        self._runner = None

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("the GPU executor is closed")
        return self._runner

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        future = self._worker.submit(_without_gradients, work)
        future.add_done_callback(lambda _: self._wake())
        return future


def _without_gradients(work: Callable[[], Result]) -> Result:
    """Call `work` in inference mode, which torch keeps for each thread apart.

    Raises `FatalEngineError` where the failure has left CUDA unusable (an illegal access, say).
    """
    with torch.inference_mode():
        try:
            return work()
        except Exception as error:
            _check_device(error)
            raise


def _check_device(error: Exception) -> None:
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception:
            raise FatalEngineError(f"CUDA is unusable after: {error}") from error
