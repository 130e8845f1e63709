"""Measuring a profile, and storing it: also what there is of it when somebody interrupts.

Progress goes to stderr. What is measured how is told by the rooms of `dualpace.profile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dualpace.cli.options import (
    CpuCores,
    GpuKvTokens,
    HostKvSize,
    HostWeights,
    LoadFormat,
    MaxModelLen,
)
from dualpace.cli.profile_report import report, show_profile
from dualpace.cli.replays import today
from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.errors import ConfigError, DualPaceError
from dualpace.core.messages import GPU
from dualpace.core.plan import Executor
from dualpace.policy.cost_model import OPERATIONS, WHOLES, Point, Step, Whole
from dualpace.profile.assist_probe import probe_assisted, probe_assists
from dualpace.profile.beside import busy_beside
from dualpace.profile.fingerprint import Fingerprint
from dualpace.profile.probes import Room, held_out_points, plan_points, probe
from dualpace.profile.table import Profile, load, path_of, require_place, save

if TYPE_CHECKING:
    from dualpace.measuring import Probed

HELD_OUT = 40  # points of each operation that a check measures, if there is time
IN_FINGERPRINT = ("cpu_cores",)  # of the options of a measurement
HOST_COPY_BANDWIDTH = 10e9  # bytes per second, about: of copies within a stand-in's memory
STANDIN_KV_TOKENS = 8192  # in which to measure a stand-in that would get no KV room by default


@dataclass(frozen=True)
class MeasureFlags:
    """What is measured: some of `EngineOptions`."""

    gpu_kv_tokens: GpuKvTokens = None
    host_kv_size: HostKvSize = "auto"
    host_weights: HostWeights = "auto"
    cpu_cores: CpuCores = None
    max_model_len: MaxModelLen = None
    load_format: LoadFormat = "auto"
    policy: Annotated[
        str,
        typer.Option(help="gated: also what that policy asks for, CPU attention, without a GPU."),
    ] = "dualpace"

    def options(self, model: str) -> EngineOptions:
        """Raises `ConfigError` naming the flag whose value cannot work."""
        return EngineOptions(model=model, **vars(self))


def measure_and_store(options: EngineOptions, seconds: float) -> Profile:
    """Measure for about so long, and store; also what there is after Ctrl-C or a failure. Raises
    `ConfigError` before that where profiles cannot be stored, after it where there is nothing."""
    console = Console(stderr=True)
    config, fingerprint = resolve_measured(options)
    require_place()
    if options.gpu_kv_tokens is None and config.gpu_pages == 0:
        pages = STANDIN_KV_TOKENS // config.page_tokens
        config = msgspec.structs.replace(config, gpu_pages=pages)
    earlier = _earlier(fingerprint)
    if earlier is not None:
        console.print(
            f"replaces the profile of {earlier.date} ({earlier.flags})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    measured = Measured()
    try:
        measured.run(config, seconds, console)
    except BaseException:
        if measured.points:
            profile = _profile(options, config, fingerprint, measured)
            if earlier is not None:
                profile = _completed(profile, earlier, console)
            _store(profile)
            report(profile)
        raise
    if not measured.points:
        raise ConfigError("nothing was measured, and nothing is stored: raise --seconds")
    profile = _profile(options, config, fingerprint, measured)
    _store(profile)
    return profile


def _store(profile: Profile) -> None:
    """Where that fails, print it at least: on a full disk, say."""
    try:
        save(profile)
    except DualPaceError:
        show_profile(profile)
        raise


class Measured:
    """Points as they come in, so that an interruption loses none.

    held_out: the seed of points that no profile plans to have, instead of those that it does.
    """

    def __init__(self, held_out: int | None = None) -> None:
        self.held_out = held_out
        self.points: list[Point] = []
        self.gpu_kv_tokens = 0
        self.copy_bandwidth = HOST_COPY_BANDWIDTH

    def run(self, config: EngineConfig, seconds: float, console: Console) -> None:
        """Measure every operation that this configuration has, each for its share of the time."""
        from dualpace.measuring import profile_executors

        assisted = config.cpu_routes != ("local",)
        # An assisted iteration is slow and is measured in several circumstances.
        share = seconds / (len(OPERATIONS) - (not config.host_weights) + 2 * assisted)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("points"), TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("loading the model", total=None)
            with contextlib.closing(profile_executors(config)) as executors:
                for each in executors:
                    if each.engine == GPU:
                        self.gpu_kv_tokens = each.gpu_pages * config.page_tokens
                        self.copy_bandwidth = each.copy_bandwidth or self.copy_bandwidth
                    for operation, room in _operations(each, config):
                        bar.reset(task, total=None, description=operation)
                        depth = config.steps_in_flight if each.engine == GPU else 1
                        with busy_beside(each.beside, _other_room(each, config)) as beside:
                            for point in self._probe(
                                operation, each.executor, room, share, depth, bar, task
                            ):
                                if beside is not None and not beside.running:
                                    break  # measured with nothing beside; the end tells why
                                self.points.append(point)
                                bar.advance(task)
                    if each.assisted is not None:
                        bar.reset(task, total=None, description="assists")
                        for point in self._probe_assists(each, config, 2 * share):
                            self.points.append(point)
                            bar.advance(task)
                    bar.reset(task, total=None, description="loading the model")

    def _probe(
        self,
        operation: Step,
        executor: Executor,
        room: Room,
        seconds: float,
        depth: int,
        bar: Progress,
        task: TaskID,
    ) -> Iterator[Point]:
        if self.held_out is None:
            bar.update(task, total=len(plan_points(operation, room)))
            return probe(operation, executor, room, seconds, depth=depth)
        points = held_out_points(operation, room, HELD_OUT, self.held_out)
        bar.update(task, total=len(points))
        return probe(operation, executor, room, seconds, points=points, depth=depth)

    def _probe_assists(
        self, probed: Probed, config: EngineConfig, seconds: float
    ) -> Iterator[Point]:
        """The parts of assisted iterations; whole ones where a profile is to be checked."""
        assert probed.assisted is not None
        assert probed.assist_seconds is not None
        engines = (probed.executor, probed.assisted)
        gpu_room = Room.of(config, "gpu", probed.gpu_pages)
        host_room = Room.of(config, "host", probed.host_pages)
        if self.held_out is None:
            yield from probe_assists(*engines, gpu_room, host_room, probed.assist_seconds, seconds)
            return
        operations = [each for each in get_args(Whole) if WHOLES[each] in config.cpu_routes]
        for operation in operations:
            points = held_out_points(operation, host_room, HELD_OUT, self.held_out)
            yield from probe_assisted(
                *engines, gpu_room, host_room, operation, points, seconds / len(operations)
            )


def _earlier(fingerprint: Fingerprint) -> Profile | None:
    """What is stored of the same, unless it cannot be read."""
    with contextlib.suppress(ConfigError):
        return load(path_of(fingerprint))
    return None


def _profile(
    options: EngineOptions, config: EngineConfig, fingerprint: Fingerprint, measured: Measured
) -> Profile:
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(MeasureFlags)
        if field.name not in IN_FINGERPRINT and getattr(options, field.name) != field.default
    }
    return Profile(
        model=options.model,
        date=today(),
        fingerprint=fingerprint,
        gpu_kv_tokens=measured.gpu_kv_tokens,
        host_kv_tokens=config.host_pages * config.page_tokens,
        points=tuple(measured.points),
        copy_bandwidth=measured.copy_bandwidth,
        options=given,
    )


def _completed(profile: Profile, earlier: Profile, console: Console) -> Profile:
    """What an interrupted run did not reach stays as it was, where it was measured likewise."""
    old = profile.not_again(earlier)
    if not old:
        return profile
    if profile.options != earlier.options:
        said = f"nothing is kept of {earlier.date}: that was measured with {earlier.flags}"
    else:
        counts = Counter(point.operation for point in old)
        kept = ", ".join(f"{count} of {operation}" for operation, count in counts.items())
        said = f"points of {earlier.date} that are kept: {kept}"
        profile = profile.keeping(old)
    console.print(said, highlight=False, soft_wrap=True)
    return profile


def resolve_measured(options: EngineOptions) -> tuple[EngineConfig, Fingerprint]:
    """What is measured with these options, and what it is stored under."""
    from dualpace.resolution import fingerprint_of, resolve

    config, spec = resolve(options, to_measure=True)
    return config, fingerprint_of(config, spec)


def _operations(probed: Probed, config: EngineConfig) -> Iterator[tuple[Step, Room]]:
    """What to measure on an engine."""
    if probed.engine != GPU:
        yield "cpu_iteration", Room.of(config, "host", probed.host_pages)
    elif probed.gpu_pages:
        yield "gpu_decode", Room.of(config, "gpu", probed.gpu_pages)
        yield "gpu_prefill", Room.of(config, "gpu", probed.gpu_pages)
    else:
        yield "gpu_prefill", Room.of(config, "host", probed.host_pages)


def _other_room(probed: Probed, config: EngineConfig) -> Room:
    """That of the engine beside the one that is measured."""
    if probed.engine == GPU:
        return Room.of(config, "host", probed.host_pages)
    return Room.of(config, "gpu", probed.gpu_pages)
