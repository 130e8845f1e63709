"""`dualpace profile`: measure what this machine takes for this model, and look at what is stored.

Chooses and shows; the work is done by the rooms of `dualpace.profile`. Progress goes to stderr,
tables to stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
from rich.table import Table

from dualpace.cli.errors import explained
from dualpace.cli.logs import set_up_logging
from dualpace.cli.options import (
    CpuCores,
    GpuKvTokens,
    HostKvSize,
    HostWeights,
    LoadFormat,
    MaxModelLen,
    Model,
    require_writable,
    takes_options,
)
from dualpace.cli.replays import today
from dualpace.cli.tables import table_console
from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.errors import ConfigError
from dualpace.core.messages import GPU
from dualpace.core.plan import Executor, Tier
from dualpace.policy.cost_model import (
    OPERATIONS,
    PARTS,
    WHOLES,
    Operation,
    Point,
    Step,
    TableCostModel,
    Whole,
)
from dualpace.profile.assist_probe import probe_assisted, probe_assists
from dualpace.profile.chart import draw
from dualpace.profile.check import MEDIAN_BOUND, P90_BOUND, accuracy
from dualpace.profile.fingerprint import Fingerprint
from dualpace.profile.probes import Room, held_out_points, plan_points, probe
from dualpace.profile.shipped import file_of, shipped_names
from dualpace.profile.table import Profile, find, load, path_of, save

if TYPE_CHECKING:
    from dualpace.measuring import Probed

HELD_OUT = 40  # points of each operation that a check measures, if there is time
IN_FINGERPRINT = ("cpu_cores",)  # of the options of a measurement
HOST_COPY_BANDWIDTH = 10e9  # bytes per second, about: of copies within a stand-in's memory
STANDIN_KV_TOKENS = 8192  # in which to measure a stand-in that would get no KV room by default

profile_app = typer.Typer(
    help="Measure what steps of a model take on this machine.", no_args_is_help=True
)


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


Seconds = Annotated[float, typer.Option(min=0.0, help="About how long to measure, loading apart.")]


@profile_app.command()
@takes_options
def run(model: Model, flags: MeasureFlags, seconds: Seconds = 30.0) -> None:
    """Measure MODEL, store the profile, print it.

    An earlier profile of the same machine and model is replaced. After Ctrl-C what was measured is
    kept, and of the earlier one what was not reached, if it was measured with the same options.
    """
    set_up_logging(logging.WARNING)
    with explained():
        _report(measure_and_store(flags.options(model), seconds))


def measure_and_store(options: EngineOptions, seconds: float) -> Profile:
    """Measure for about so long, and store; also what there is after Ctrl-C or a failure."""
    console = Console(stderr=True)
    config, fingerprint = _resolve(options)
    if options.gpu_kv_tokens is None and config.gpu_pages == 0:
        pages = STANDIN_KV_TOKENS // config.page_tokens
        config = msgspec.structs.replace(config, gpu_pages=pages)
    earlier = _earlier(fingerprint)
    if earlier is not None:
        console.print(
            f"replaces the profile of {earlier.date} ({earlier.flags})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    measured = _Measured()
    try:
        measured.run(config, seconds, console)
    except BaseException:
        if measured.points:
            profile = _profile(options, config, fingerprint, measured)
            if earlier is not None:
                profile = _completed(profile, earlier, console)
            save(profile)
            _report(profile)
        raise
    profile = _profile(options, config, fingerprint, measured)
    save(profile)
    return profile


@profile_app.command()
def show(
    model: Annotated[
        str, typer.Argument(help="What was measured, a profile's .json file or shipped name.")
    ],
    cpu_cores: CpuCores = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            help="Also draw by which route a CPU batch gains most, and what either engine takes "
            "for what (.png, .svg or .pdf)."
        ),
    ] = None,
) -> None:
    """Print the stored profile of MODEL on this machine, or the one in a file; last, its place."""
    set_up_logging(logging.WARNING)
    with explained():
        require_writable(figure=chart)
        if model.endswith(".json") or model in shipped_names():
            path = file_of(model)
            profile = load(path)
        else:
            fingerprint = _resolve(EngineOptions(model=model, cpu_cores=cpu_cores))[1]
            path, profile = path_of(fingerprint), find(fingerprint)
        _show(profile)
        _tell_place(path)
        if chart is not None:
            draw(profile, chart)


@profile_app.command()
@takes_options
def check(
    model: Model,
    flags: MeasureFlags,
    seconds: Seconds = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the points that are drawn.")] = 0,
) -> None:
    """Measure points that the stored profile of MODEL does not have, and print how far off it is.

    Fails where an operation's errors exceed 8% at the median or 20% at the 90th percentile.
    """
    set_up_logging(logging.WARNING)
    with explained():
        config, fingerprint = _resolve(flags.options(model))
        profile = find(fingerprint)
        if not config.gpu_pages:
            pages = profile.gpu_kv_tokens // config.page_tokens
            config = msgspec.structs.replace(config, gpu_pages=pages or config.gpu_pages)
        measured = _Measured(held_out=seed)
        measured.run(config, seconds, Console(stderr=True))
        found = accuracy(TableCostModel(profile.points), measured.points)
    table = Table(title=f"predictions of {profile.date}", title_justify="left")
    for title in ("operation", "points", "median", "p90", "worst", "extrapolated"):
        table.add_column(title, justify="left" if title == "operation" else "right")
    for each in found:
        worst = f"{each.worst.size} × {each.worst.context}"
        table.add_row(
            each.operation, str(each.points), f"{each.median:.1%}", f"{each.p90:.1%}", worst,
            str(each.extrapolated),
        )  # fmt: skip
    table_console().print(table)
    off = [each.operation for each in found if not each.good]
    if off or not found:
        Console(stderr=True).print(
            f"failed: {', '.join(off)} off by more than {MEDIAN_BOUND:.0%} at the median or "
            f"{P90_BOUND:.0%} at the 90th percentile" if off else "failed: nothing was measured",
            soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(1)


class _Measured:
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
                        for point in self._probe(
                            operation, each.executor, room, share, depth, bar, task
                        ):
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
        gpu_room = _room("gpu", probed.gpu_pages, config)
        host_room = _room("host", probed.host_pages, config)
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
    options: EngineOptions, config: EngineConfig, fingerprint: Fingerprint, measured: _Measured
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


def _operations(probed: Probed, config: EngineConfig) -> Iterator[tuple[Step, Room]]:
    """What to measure on an engine."""
    if probed.engine != GPU:
        yield "cpu_iteration", _room("host", probed.host_pages, config)
    elif probed.gpu_pages:
        yield "gpu_decode", _room("gpu", probed.gpu_pages, config)
        yield "gpu_prefill", _room("gpu", probed.gpu_pages, config)
    else:
        yield "gpu_prefill", _room("host", probed.host_pages, config)


def _room(tier: Tier, pages: int, config: EngineConfig) -> Room:
    return Room(
        tier,
        pages,
        config.page_tokens,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
    )


def _resolve(options: EngineOptions) -> tuple[EngineConfig, Fingerprint]:
    from dualpace.resolution import fingerprint_of, resolve

    config, spec = resolve(options, to_measure=True)
    return config, fingerprint_of(config, spec)


def _report(profile: Profile) -> None:
    """Print a profile just stored, and where it is."""
    _show(profile)
    _tell_place(path_of(profile.fingerprint))


def _tell_place(path: Path) -> None:
    Console(stderr=True).print(f"stored in {path}", markup=False, highlight=False, soft_wrap=True)


def _show(profile: Profile) -> None:
    console = table_console()
    console.print(
        f"{profile.model}, {profile.fingerprint.dtype}, {profile.date}, on "
        f"{profile.fingerprint.hardware}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if profile.note:
        console.print(profile.note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"copies between the tiers: {profile.copy_bandwidth / 1e9:.3g} GB/s")
    for operation in (*OPERATIONS, *PARTS):
        points = [point for point in profile.points if point.operation == operation]
        if points:
            console.print(_table(operation, points))


def _table(operation: Operation, points: list[Point]) -> Table:
    """Sizes down, contexts across, milliseconds in the cells."""
    size = "tokens" if operation == "gpu_prefill" else "rows"
    title = f"{operation}: ms by {size} and tokens of context"
    table = Table(title=title, title_justify="left", min_width=len(title))
    contexts = sorted({point.context for point in points})
    table.add_column(size, justify="right")
    for context in contexts:
        table.add_column(str(context), justify="right")
    seconds = {(point.size, point.context): point.seconds for point in points}
    for rows in sorted({point.size for point in points}):
        cells = (seconds.get((rows, context)) for context in contexts)
        table.add_row(str(rows), *("" if cell is None else f"{cell * 1e3:.4g}" for cell in cells))
    return table
