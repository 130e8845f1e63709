"""The GPU engine's executor: a thread launches steps and copies, others await what comes of them.

Knows threads and futures; what a step does is the runner's, what to run is decided by whoever
launches.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from dualpace.assist.mailbox import Mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.errors import (
    EngineError,
    FatalEngineError,
    HardwareError,
    StepTooLargeError,
)
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Batch, CopyJob, StepResult
from dualpace.core.timeline import Timeline
from dualpace.gpu.device import ask_for_queues
from dualpace.gpu.device_clock import DeviceClock
from dualpace.gpu.gate import release_cache, synchronize
from dualpace.gpu.runner import LaunchedStep, ModelRunner
from dualpace.models.tensors import Weight

Result = TypeVar("Result")


class TorchExecutor:
    """`core.plan.Executor` on torch, for CUDA or the CPU stand-in. A ticket is a `Future`.

    A step may be launched before the last one's ticket is done: on CUDA it is queued on the device
    meanwhile. A step or copy that raises fails its own ticket and nothing else.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Iterable[tuple[str, Weight]],
        *,
        arena: Any | None,
        wake: Callable[[], None],
        mailbox: Mailbox | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Load the weights and set up both pools; returns when the first batch can be launched.

        weights: as from `models.weights.iter_weights`, in `config.dtype`; arena: writable buffer
        (an mmap) of at least host_pages × page_bytes, or None without host pages; wake: called
        after each finished ticket, and when more host pages have become usable, from any thread;
        mailbox: the GPU's end of the one through which the CPU engine's iterations are assisted;
        timeline: gets what is launched, and on CUDA when the device computes what.
        Raises `HardwareError` where the device has no room for KV, `EngineError` for a short arena.
        """
        self._wake = wake
        self._timeline = timeline
        self._device_clock: DeviceClock | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-launch")
        self._awaiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-await")
        # Loads and stores go their own ways, and a ticket must not wait for another's copy.
        self._copy_awaiter = ThreadPoolExecutor(max_workers=4, thread_name_prefix="copy-await")
        try:
            # On the worker, because torch keeps these for each thread apart.
            if config.device == "cpu":
                self._worker.submit(torch.set_num_threads, config.gpu_threads).result()
            else:
                ask_for_queues()
                self._worker.submit(lambda: torch.cuda.set_stream(torch.cuda.Stream())).result()
                if timeline is not None:
                    self._device_clock = DeviceClock(timeline.clock)
            self._runner: ModelRunner | None = self._worker.submit(
                _without_gradients,
                partial(
                    ModelRunner, config, spec, weights, arena, wake, mailbox, timeline is not None
                ),
            ).result()
        except StepTooLargeError as error:
            self._shut_down()
            raise HardwareError(f"the model does not fit the GPU: {error}") from error
        except BaseException:
            self._shut_down()
            raise

    @property
    def gpu_pages(self) -> int:
        """Pages of the GPU pool, measured where the config left it open."""
        return self._open_runner().gpu_pages

    @property
    def usable_host_pages(self) -> int:
        """Host pages, from 0 on, that can be copied by now; grows in the background."""
        return self._open_runner().usable_host_pages

    def launch(self, batch: Batch) -> Future[StepResult]:
        """Start a step after everything launched before it.

        Its ticket raises `StepTooLargeError` where the device lacks the memory for it.
        """
        name = f"step {batch.number}"
        launched = self._start(name, partial(self._open_runner().launch, batch))
        return self._ticket(self._awaiter.submit(self._await_tokens, name, launched))

    def copy(self, job: CopyJob) -> Future[None]:
        """Start a copy; on CUDA it runs beside the steps."""
        started = self._start(job.kind, partial(self._open_runner().copy, job))
        return self._ticket(self._copy_awaiter.submit(_await_copy, started))

    def assist_seconds(self, rows: int, copies: bool) -> float:
        """Seconds of the dense work of an assisted iteration when nobody is waited for.

        copies: between the mailbox and the device. Between iterations only.
        """
        runner = self._open_runner()
        return self._worker.submit(
            _without_gradients, partial(runner.assist_seconds, rows, copies)
        ).result()

    def close(self) -> None:
        """Finish what was launched, then let go of threads, weights, pools and the arena."""
        self._shut_down()
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _shut_down(self) -> None:
        for pool in (self._worker, self._awaiter, self._copy_awaiter):
            pool.shutdown(wait=True)

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("the GPU executor is closed")
        return self._runner

    def _start(self, name: str, work: Callable[[], Result]) -> Future[Result]:
        """Have the worker do it."""

        def noted() -> Result:
            noting = self._timeline.span("launch", name) if self._timeline else None
            with noting or contextlib.nullcontext():
                return _without_gradients(work)

        return self._worker.submit(noted)

    def _await_tokens(self, name: str, launched: Future[LaunchedStep]) -> StepResult:
        step = launched.result()
        result = _checked(step.result)
        if self._timeline and self._device_clock and step.begun and step.arrived:
            seconds = self._device_clock.seconds
            self._timeline.add("device", name, seconds(step.begun), seconds(step.arrived))
        return result

    def _ticket(self, future: Future[Result]) -> Future[Result]:
        future.add_done_callback(lambda _: self._wake())
        return future


def _await_copy(started: Future[torch.cuda.Event | None]) -> None:
    ended = started.result()
    if ended is not None:
        _checked(ended.synchronize)


def _without_gradients(work: Callable[[], Result]) -> Result:
    """Call `work` in inference mode, which torch keeps for each thread apart."""
    with torch.inference_mode():
        return _checked(work)


def _checked(work: Callable[[], Result]) -> Result:
    """Call `work`; raises `FatalEngineError` where a failure has left CUDA unusable (an illegal
    access, say), and `StepTooLargeError` where it wanted more memory than there is."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        # The frames of the failed step hold its tensors for as long as the error lives.
        traceback.clear_frames(error.__traceback__)
        release_cache()
        raise StepTooLargeError(f"out of GPU memory: {error}") from None
    except Exception as error:
        if torch.cuda.is_initialized():
            try:
                synchronize()
            except Exception:
                raise FatalEngineError(f"CUDA is unusable after: {error}") from error
        raise
