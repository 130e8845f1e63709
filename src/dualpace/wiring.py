"""The one file that knows every room: it puts engines and server together.

`Server` is the parent process's half (frontend and supervisor); `run_engine` is the whole of an
engine's process. What the options come to is settled in `resolution`, what computes is made in
`executors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dualpace.assist.mailbox import create_mailbox
from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.garbage import freeze_heap
from dualpace.core.messages import CPU, FRONTEND, GPU, EngineName, EngineReady, PeerDrained
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Executor
from dualpace.core.timeline import Timeline
from dualpace.cpu.memory import create_arena, map_arena
from dualpace.executors import cpu_executor, gpu_executor, layout_of
from dualpace.heartbeat import Heartbeat
from dualpace.ipc import EnginePort
from dualpace.loop import EngineLoop, Scheduler
from dualpace.models.registry import ModelSource, require_tokenizer, resolve_tokenizer
from dualpace.models.registry import resolve as resolve_source
from dualpace.models.spec import load_spec
from dualpace.policy.gated import longest_request
from dualpace.policy.registry import make_policy
from dualpace.policy.view import Policy
from dualpace.profile.settle import host_rules, lacks_profile
from dualpace.resolution import ELEMENT_BYTES, device_of, fingerprint_of, resolve
from dualpace.runtime import remove as remove_runtime
from dualpace.scheduler.attendant import Attendant
from dualpace.scheduler.cpu import CpuScheduler
from dualpace.scheduler.gated import GatedScheduler
from dualpace.scheduler.gated_cpu import GatedCpuScheduler
from dualpace.scheduler.gpu import GpuScheduler
from dualpace.server.checks import Limits
from dualpace.server.frontend import Frontend
from dualpace.server.metrics import Metrics
from dualpace.server.tokenizer import NoTokenizer
from dualpace.supervisor import Launch, Supervisor, Timeouts

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
# Seconds that a thread of an engine keeps Python to itself while another wants it. A step is
# launched by hundreds of calls, each of which lets go of Python; with Python's own 5 ms one that
# plans meanwhile would hold it up for as long as planning takes.
SWITCH_INTERVAL = 1e-4


class EngineJob(msgspec.Struct, frozen=True):
    """All that an engine's process is told; it travels as the one argument of its command line."""

    launch: Launch
    config: EngineConfig
    arena_fd: int | None
    mailbox_fd: int | None
    log_level: int


# -- the parent process --------------------------------------------------------------------------


@dataclass
class Server:
    """Frontend and supervised engines in one asyncio program. Made by `start`."""

    config: EngineConfig
    spec: ModelSpec
    frontend: Frontend
    supervisor: Supervisor
    _inbox: asyncio.Task[None]
    _descriptors: tuple[int, ...]

    @classmethod
    async def start(cls, options: EngineOptions, metrics: Metrics | None = None) -> Server:
        """Start everything; returns when requests are taken. The event loop is free meanwhile.

        metrics: what the frontend is to count in. Raises `ConfigError`, `ModelError`,
        `HardwareError`, or `EngineError` with an engine's own reason; then nothing is left running.
        """
        tokenizer_source = _tokenizer_source(options)
        await _profile_first(options)
        config, spec = await asyncio.to_thread(resolve, options)
        arena_bytes = config.host_pages * config.page_bytes
        arena_fd = create_arena(arena_bytes) if arena_bytes else None
        mailbox_fd = None
        if config.cpu_routes != ("local",):
            mailbox_fd = create_mailbox(layout_of(config, spec))
        descriptors = tuple(fd for fd in (arena_fd, mailbox_fd) if fd is not None)
        try:
            supervisor = _supervisor(options, config, arena_fd, mailbox_fd)
        except BaseException:
            _close_all(descriptors)
            raise
        starting = asyncio.ensure_future(supervisor.start())
        inbox: asyncio.Task[None] | None = None
        try:
            tokenizer = await asyncio.to_thread(_load_tokenizer, tokenizer_source)
            limits = Limits(config.max_model_len, spec.vocab_size, spec.eos_ids)
            engines: tuple[EngineName, ...] = (GPU, CPU) if config.host_pages else (GPU,)
            frontend = Frontend(tokenizer, limits, supervisor.port.send, metrics, engines)
            supervisor.on_exit = frontend.engine_down
            supervisor.on_hang = frontend.metrics.engine_hung
            supervisor.on_host_gone = frontend.host_gone
            supervisor.on_gpu_death = frontend.fail_all
            inbox = asyncio.ensure_future(_dispatch(supervisor, frontend))
            await starting
        except BaseException:
            await _stop(starting, inbox, supervisor, descriptors)
            raise
        return cls(config, spec, frontend, supervisor, inbox, descriptors)

    async def close(self) -> None:
        """End every stream, stop the engines, give memory back."""
        self.frontend.fail_all("the server is shutting down")
        await _stop(None, self._inbox, self.supervisor, self._descriptors)


async def _profile_first(options: EngineOptions) -> None:
    """Measure this machine and model for half a minute, if that is of use and was never done."""
    if options.profile != "auto" or device_of(options) != "cuda":
        return
    config, spec = await asyncio.to_thread(resolve, options, to_measure=True)
    if not lacks_profile(options, config, fingerprint_of(config, spec)):
        return
    logger.info("measuring for a profile first: half a minute, once (--profile none goes without)")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualpace.cli.quick_profile", msgspec.json.encode(options).decode(),
        stdin=asyncio.subprocess.PIPE,  # closes if this process is killed
    )  # fmt: skip
    try:
        code = await process.wait()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if code:
        logger.warning("there is no profile: measuring ended with code %d; going on without", code)


async def _stop(
    starting: asyncio.Task[None] | None,
    inbox: asyncio.Task[None] | None,
    supervisor: Supervisor,
    descriptors: tuple[int, ...],
) -> None:
    for task in (starting, inbox):
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
    await supervisor.close()
    _close_all(descriptors)


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _tokenizer_source(options: EngineOptions) -> ModelSource | None:
    """Where the tokenizer is, unless none is wanted. Raises `ModelError` where there is none."""
    if options.skip_tokenizer_init:
        return None
    if options.tokenizer is not None:
        source = resolve_tokenizer(options.tokenizer)
    else:
        source = resolve_source(options.model)
    require_tokenizer(source)
    return source


def _load_tokenizer(source: ModelSource | None) -> Any:
    if source is None:
        return NoTokenizer()
    from dualpace.models.tokenizer import load_tokenizer  # slow to import

    return load_tokenizer(source)


def _supervisor(
    options: EngineOptions, config: EngineConfig, arena_fd: int | None, mailbox_fd: int | None
) -> Supervisor:
    def command(launch: Launch) -> list[str]:
        level = logging.getLogger().getEffectiveLevel()
        job = EngineJob(launch, config, arena_fd, mailbox_fd, level)
        return [sys.executable, "-m", "dualpace.cli.engine", msgspec.json.encode(job).decode()]

    pass_fds = tuple(fd for fd in (arena_fd, mailbox_fd) if fd is not None)
    timeouts = Timeouts(options.engine_timeout, options.step_timeout)
    return Supervisor(command, pass_fds, config.host_pages, timeouts)


async def _dispatch(supervisor: Supervisor, frontend: Frontend) -> None:
    """Messages to this process: some are the supervisor's, the rest the frontend's."""
    async for envelope in supervisor.port.envelopes():
        match envelope.body:
            case PeerDrained(generation):
                supervisor.peer_drained(generation)
            case EngineReady() as ready if not supervisor.engine_ready(envelope.sender, ready):
                pass  # of a process that is dead already
            case _:
                try:
                    frontend.on_envelope(envelope)
                except Exception:  # one request's trouble must not silence the engines
                    logger.exception("a message of the %s engine was not handled", envelope.sender)


# -- an engine's process -------------------------------------------------------------------------


def run_engine(job_text: str) -> None:
    """Be an engine until told to stop. Raises what kept it from starting or going on."""
    job = msgspec.json.decode(job_text, type=EngineJob)
    launch, config = job.launch, job.config
    logging.getLogger().setLevel(job.log_level)
    _die_with_parent(launch)
    if launch.name == CPU:
        _die_before_others()
    logger.info("%s engine: loading %s", launch.name, config.model)
    started = time.monotonic()
    try:
        port = EnginePort(launch.name, launch.address)
        port.generation = launch.generation
        port.connect(FRONTEND, launch.frontend_address)
        arena = None
        if job.arena_fd is not None:
            arena = map_arena(job.arena_fd, config.host_pages * config.page_bytes)
        timeline = Timeline(launch.name) if config.timeline else None
        build = partial(_build_gpu, timeline=timeline) if launch.name == GPU else _build_cpu
        # A second engine that loads at the same time would draw over this one's bar.
        bar = sys.stderr.isatty() and job.arena_fd is None
        scheduler, executor, ready = build(config, arena, port.wake, job.mailbox_fd, bar=bar)
        if launch.name == CPU:
            port.connect(GPU, launch.gpu_address)
        port.send(FRONTEND, ready)
        logger.info(
            "%s engine: ready after %.1f s with %d tokens of KV",
            launch.name, time.monotonic() - started, ready.kv_tokens,
        )  # fmt: skip
        sys.setswitchinterval(SWITCH_INTERVAL)
        freeze_heap()
        depth = config.steps_in_flight if launch.name == GPU else 1
        beat = Heartbeat(launch.heartbeat)
        EngineLoop(scheduler, executor, port, time.monotonic, depth, beat, timeline).run()
        if timeline and config.timeline:
            timeline.write(Path(config.timeline))
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk is full: the log has it
            Path(launch.error_file).write_text(f"{type(error).__name__}: {error}")
        raise
    executor.close()
    port.close()


def _build_gpu(
    config: EngineConfig,
    arena: Any,
    wake: Callable[[], None],
    mailbox_fd: int | None = None,
    *,
    bar: bool = False,
    timeline: Timeline | None = None,
) -> tuple[Scheduler, Executor, EngineReady]:
    executor = gpu_executor(config, arena, wake, mailbox_fd, bar, timeline)
    policy = _policy(config, load_spec(resolve_source(config.model)))
    tokens = executor.gpu_pages * config.page_tokens
    ready = EngineReady(os.getpid(), tokens, config.page_tokens)
    if config.policy == "gated":
        gated = GatedScheduler(
            policy,
            executor.gpu_pages,
            config.host_pages,
            config.page_tokens,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            attendant=Attendant(),
            usable_host_pages=lambda: executor.usable_host_pages,
        )
        longest = longest_request(executor.gpu_pages, config.page_tokens)
        return gated, executor, msgspec.structs.replace(ready, longest=longest)
    scheduler = GpuScheduler(
        policy,
        executor.gpu_pages,
        config.page_tokens,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        usable_host_pages=lambda: executor.usable_host_pages,
    )
    return scheduler, executor, ready


def _build_cpu(
    config: EngineConfig,
    arena: Any,
    wake: Callable[[], None],
    mailbox_fd: int | None = None,
    *,
    bar: bool = False,
) -> tuple[Scheduler, Executor, EngineReady]:
    executor = cpu_executor(config, arena, wake, mailbox_fd, bar)
    tokens = config.host_pages * config.page_tokens
    ready = EngineReady(os.getpid(), tokens, config.page_tokens)
    if config.policy == "gated":  # the GPU engine must be able to hold every request
        return GatedCpuScheduler(), executor, msgspec.structs.replace(ready, longest=0)
    policy = _policy(config, load_spec(resolve_source(config.model)))
    scheduler = CpuScheduler(policy, config.host_pages, config.page_tokens, config.max_num_seqs)
    return scheduler, executor, ready


def _policy(config: EngineConfig, spec: ModelSpec) -> Policy:
    rules = host_rules(config, spec.num_parameters * ELEMENT_BYTES[config.dtype])
    return make_policy(
        config.policy, config.max_num_seqs, rules, config.gpu_itl_target, spec.num_layers
    )


def _die_with_parent(launch: Launch) -> None:
    """Exit at once when the parent's end of the lifeline closes, whatever this process does, and
    leave no runtime directory behind."""
    # Were this process stopped, it would not see the pipe close.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        os.read(launch.lifeline, 1)
        remove_runtime(Path(launch.error_file).parent)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _die_before_others() -> None:
    """Where memory runs out, the kernel shall take the engine that can be done without."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
