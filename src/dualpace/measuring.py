"""Engines' executors in the process that measures them, without schedulers and sockets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from dualpace.assist.mailbox import Mailbox, create_mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.messages import CPU, GPU, EngineName
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Executor
from dualpace.cpu.memory import create_arena, map_arena
from dualpace.executors import cpu_executor, end_of_mailbox, gpu_executor, layout_of
from dualpace.models.registry import resolve
from dualpace.models.spec import load_spec

if TYPE_CHECKING:
    from dualpace.cpu.executor import CpuExecutor
    from dualpace.cpu.standin import StandInExecutor
    from dualpace.gpu.executor import TorchExecutor

PROBED_BYTES = 24 * 2**30  # of host KV, for a profile


@dataclass(frozen=True)
class Probed:
    """One engine's executor, to be measured, and the pages that there are.

    beside: the other engine's, to be kept busy meanwhile: they share memory, the stand-in's, too;
    copy_bandwidth: bytes per second between the tiers, None where there is no link; assisted: the
    CPU engine's, without weights, whose dense work this GPU's executor does; assist_seconds: what
    that takes for so many rows, with nobody waited for.
    """

    engine: EngineName
    executor: Executor
    gpu_pages: int
    host_pages: int
    beside: Executor | None = None
    copy_bandwidth: float | None = None
    assisted: Executor | None = None
    assist_seconds: Callable[[int], float] | None = None


def profile_executors(config: EngineConfig) -> Generator[Probed, None]:
    """Each engine's executor in turn, in this process, the GPU engine's first.

    Close the generator to end early. The arena is no larger than it takes to tell the time that a
    token of KV takes.
    """
    pages = min(config.host_pages, PROBED_BYTES // config.page_bytes)
    # Gated steps are judged by what assists take.
    config = msgspec.structs.replace(config, host_pages=pages, policy="dualpace")
    arena = own_arena(config)
    gpu: TorchExecutor | StandInExecutor
    with contextlib.ExitStack() as engines:

        def cpu_engine() -> CpuExecutor:
            executor = cpu_executor(config, arena, _ignore)
            engines.enter_context(contextlib.closing(executor))
            executor.prepare()
            return executor

        cpu = None
        if config.cpu_routes != ("local",) and arena is not None:
            assisting = engines.enter_context(assisting_gpu(config, arena))
            gpu = assisting.executor
            with assisting.cpu_executor() as assisted:
                yield Probed(
                    GPU, gpu, gpu.gpu_pages, pages, copy_bandwidth=_link(config),
                    assisted=assisted, assist_seconds=partial(gpu.assist_seconds, copies=True),
                )  # fmt: skip
        else:
            # CUDA would register the host's pages, which would disturb what is measured; without
            # pages of its own, whose number may not be known yet, it needs them.
            alone = config.device == "cuda" and config.gpu_pages != 0
            bare = msgspec.structs.replace(config, host_pages=0) if alone else config
            gpu = gpu_executor(bare, None if alone else arena, _ignore)
            engines.enter_context(contextlib.closing(gpu))
            if config.device == "cpu" and arena is not None and config.host_weights:
                cpu = cpu_engine()
            yield Probed(GPU, gpu, gpu.gpu_pages, pages, beside=cpu, copy_bandwidth=_link(config))
        if arena is not None and config.host_weights:
            yield Probed(CPU, cpu or cpu_engine(), gpu.gpu_pages, pages, beside=gpu)


@contextlib.contextmanager
def gpu_over_arena(config: EngineConfig) -> Iterator[TorchExecutor | StandInExecutor]:
    """The GPU engine's executor over host pages of its own, which it makes known to CUDA."""
    with contextlib.closing(gpu_executor(config, own_arena(config), _ignore)) as executor:
        yield executor


@dataclass(frozen=True)
class AssistingGpu:
    """The GPU engine's executor in this process, serving a mailbox, and two ways of being the CPU
    engine at its other end, one at a time."""

    executor: TorchExecutor
    _config: EngineConfig
    _spec: ModelSpec
    _mailbox_fd: int
    _arena: Any

    @contextlib.contextmanager
    def mailbox(self) -> Iterator[Mailbox]:
        """The CPU's end of the mailbox itself."""
        mailbox = end_of_mailbox(self._config, self._spec, self._mailbox_fd, "cpu")
        assert mailbox is not None
        with contextlib.closing(mailbox):
            yield mailbox

    @contextlib.contextmanager
    def cpu_executor(self) -> Iterator[CpuExecutor]:
        """The CPU engine's executor, without weights, over the arena."""
        bare = msgspec.structs.replace(self._config, host_weights=False)
        made = cpu_executor(bare, self._arena, _ignore, self._mailbox_fd)
        with contextlib.closing(made) as executor:
            executor.prepare()
            yield executor


@contextlib.contextmanager
def assisting_gpu(config: EngineConfig, arena: Any) -> Iterator[AssistingGpu]:
    """A GPU that knows nothing of the host's pages but serves the CPU engine's iterations."""
    spec = load_spec(resolve(config.model))
    mailbox_fd = create_mailbox(layout_of(config, spec))
    try:
        alone = msgspec.structs.replace(config, host_pages=0)
        with contextlib.closing(gpu_executor(alone, None, _ignore, mailbox_fd)) as executor:
            # With a mailbox it is torch's, whatever the device.
            yield AssistingGpu(executor, config, spec, mailbox_fd, arena)  # type: ignore[arg-type]
    finally:
        os.close(mailbox_fd)


def _link(config: EngineConfig) -> float | None:
    """The slower direction of copies between the tiers."""
    if config.device != "cuda":
        return None
    from dualpace.gpu.link import link_bandwidth

    return min(link_bandwidth("load"), link_bandwidth("store"))


def own_arena(config: EngineConfig) -> Any:
    """The host's pages, for this process alone; None without any."""
    size = config.host_pages * config.page_bytes
    if not size:
        return None
    descriptor = create_arena(size)
    try:
        return map_arena(descriptor, size)
    finally:
        os.close(descriptor)


def _ignore() -> None:
    pass
