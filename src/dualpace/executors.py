"""Executors as a configuration wants them, and what they are made of: weights, mailbox, arena.

Knows both engines' rooms; no scheduler, no process, no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from dualpace.assist.mailbox import Layout, Mailbox, mailbox_layout, open_mailbox
from dualpace.core.config import EngineConfig
from dualpace.core.messages import CPU, GPU, EngineName
from dualpace.core.model_spec import ModelSpec
from dualpace.core.timeline import Timeline
from dualpace.cpu._native import supported_isas
from dualpace.cpu.threads import allowed_cores
from dualpace.models.progress import with_progress
from dualpace.models.registry import resolve
from dualpace.models.spec import load_spec
from dualpace.models.tensors import Weight
from dualpace.resolution import ELEMENT_BYTES

if TYPE_CHECKING:
    from dualpace.cpu.executor import CpuExecutor
    from dualpace.cpu.standin import StandInExecutor
    from dualpace.gpu.executor import TorchExecutor


def gpu_executor(
    config: EngineConfig,
    arena: Any,
    wake: Callable[[], None],
    mailbox_fd: int | None = None,
    bar: bool = False,
    timeline: Timeline | None = None,
) -> TorchExecutor | StandInExecutor:
    """Torch for CUDA. Without a GPU the C++ engine stands in; and torch again where that has none
    but its portable kernels, which are there to be right and not to be fast, and where the CPU
    engine is to be assisted."""
    spec, weights = checkpoint(config, GPU, bar)
    fast = "portable" not in (supported_isas()[-1], config.cpu_isa)
    if config.device == "cpu" and fast and mailbox_fd is None:
        from dualpace.cpu.model import CpuModel
        from dualpace.cpu.standin import StandInExecutor

        cores = _stand_in_cores(config)
        model = CpuModel(spec, weights, dtype=config.dtype, cores=cores, isa=config.cpu_isa)
        return StandInExecutor(model, config.gpu_pages or 0, arena, config.page_tokens, wake)
    from dualpace.gpu.executor import TorchExecutor  # imports torch, which the CPU engine must not

    mailbox = end_of_mailbox(config, spec, mailbox_fd, "gpu")
    return TorchExecutor(
        config, spec, weights, arena=arena, wake=wake, mailbox=mailbox, timeline=timeline
    )


def _stand_in_cores(config: EngineConfig) -> tuple[int, ...]:
    """The cores that the CPU engine leaves; all of them where it does not run."""
    spare = tuple(core for core in allowed_cores() if core not in config.cpu_ids)
    return (spare if config.host_pages and spare else config.cpu_ids)[: config.gpu_threads]


def cpu_executor(
    config: EngineConfig,
    arena: Any,
    wake: Callable[[], None],
    mailbox_fd: int | None = None,
    bar: bool = False,
) -> CpuExecutor:
    """The CPU engine's, with weights where the configuration gives the host some."""
    from dualpace.cpu.executor import CpuExecutor
    from dualpace.cpu.model import CpuModel

    spec, weights = checkpoint(config, CPU, bar)
    model = CpuModel(
        spec,
        weights if config.host_weights else None,
        dtype=config.dtype,
        cores=config.cpu_ids,
        isa=config.cpu_isa,
        mailbox=end_of_mailbox(config, spec, mailbox_fd, "cpu"),
    )
    return CpuExecutor(model, arena, config.page_tokens, wake)


def end_of_mailbox(
    config: EngineConfig, spec: ModelSpec, descriptor: int | None, side: Literal["cpu", "gpu"]
) -> Mailbox | None:
    """That side's, if there is a mailbox."""
    if descriptor is None:
        return None
    return open_mailbox(descriptor, layout_of(config, spec), side)


def layout_of(config: EngineConfig, spec: ModelSpec) -> Layout:
    """Of the mailbox between the engines."""
    return mailbox_layout(spec, config.dtype, config.max_num_seqs, config.max_model_len)


def checkpoint(
    config: EngineConfig, engine: EngineName, bar: bool
) -> tuple[ModelSpec, Iterator[tuple[str, Weight]]]:
    """Spec and weights; their progress is shown as they are taken, with a bar or in the log."""
    from dualpace.models.weights import iter_weights, weight_shapes

    source = resolve(config.model)
    spec = load_spec(source)
    weights = iter_weights(
        source, spec, config.dtype, load_format=config.load_format, seed=config.seed
    )
    elements = sum(map(prod, weight_shapes(spec).values()))
    total = elements * ELEMENT_BYTES[config.dtype]
    return spec, with_progress(weights, total, f"{engine} engine", bar=bar)
