"""`dualpace bench assist`: what the GPU's part of assisted CPU iterations takes, and takes away.

Chooses and shows; the work is done by `profile.assist_bench`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpace.bench.hardware import describe_machine
from dualpace.bench.provenance import describe_version
from dualpace.cli.errors import explained
from dualpace.cli.logs import set_up_logging
from dualpace.cli.options import (
    GpuKvTokens,
    JsonFile,
    LoadFormat,
    MaxModelLen,
    Model,
    kept,
    require_writable,
)
from dualpace.cli.replays import today
from dualpace.cli.tables import table_console
from dualpace.core.config import EngineConfig, EngineOptions, format_size
from dualpace.core.errors import ConfigError
from dualpace.core.plan import Batch
from dualpace.kv.pages import pages_for
from dualpace.profile.probes import Room, make_batch

if TYPE_CHECKING:
    from dualpace.profile.assist_bench import AssistReport


def assist(
    model: Model,
    rows: Annotated[
        list[int], typer.Option(min=1, max=256, help="Rows of a micro-batch; may be repeated.")
    ] = [64, 128],  # noqa: B006  # typer copies it
    attention_ms: Annotated[
        list[float], typer.Option(min=0.0, max=1e4, help="Of the CPU for a layer; may be repeated.")
    ] = [3.0, 6.0],  # noqa: B006
    decode_rows: Annotated[
        int, typer.Option(min=1, max=256, help="Of the GPU's steps beside.")
    ] = 32,
    decode_context: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 1000,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of prompts in steps beside.")] = 1024,
    host_rows: Annotated[
        int,
        typer.Option(
            min=0, max=256, help="Rows of whole iterations of the CPU engine; 0 for none."
        ),
    ] = 128,
    host_context: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 1100,
    gpu_kv_tokens: GpuKvTokens = 35_200,
    max_model_len: MaxModelLen = 4096,
    load_format: LoadFormat = "auto",
    json_file: JsonFile = None,
) -> None:
    """Measure, on a GPU, an assist's turns layer by layer, alone and beside decodes and prompts.

    Prints tables, and a JSON line last.
    """
    set_up_logging(logging.WARNING)
    console = Console(stderr=True)
    with explained():
        require_writable(json_file)
        options = EngineOptions(
            model=model,
            gpu_kv_tokens=gpu_kv_tokens,
            max_model_len=max_model_len,
            load_format=load_format,  # type: ignore[arg-type]  # checked by EngineOptions
            max_num_batched_tokens=max(chunk, 64),
            cpu_route="assist2",
            host_weights="none",
            profile="none",
        )
        report = _measure(
            options, console, rows, [each / 1e3 for each in attention_ms],
            (decode_rows, decode_context), chunk, (host_rows, host_context),
        )  # fmt: skip
    circumstances = {
        "hardware": describe_machine(), "date": today(), "version": describe_version(),
    }  # fmt: skip
    line = json.dumps(circumstances | msgspec.to_builtins(report))
    with explained(), kept(line, json_file):
        _show(report)
        typer.echo(line)


def _measure(
    options: EngineOptions,
    console: Console,
    rows: list[int],
    attention: list[float],
    decodes: tuple[int, int],
    chunk: int,
    host: tuple[int, int],
) -> AssistReport:
    from dualpace.measuring import assisting_gpu, own_arena
    from dualpace.profile.assist_bench import measure, measure_iterations
    from dualpace.resolution import resolve

    config, _ = resolve(options)
    if config.device != "cuda":
        raise ConfigError("bench assist measures a GPU, and there is none here")
    beside = batches_beside(config, decodes, chunk)
    config, batch = with_host_batch(config, host)
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("loading the model"))
        arena = own_arena(config)
        gpu = stack.enter_context(assisting_gpu(config, arena))
        with gpu.mailbox() as mailbox:
            report = measure(
                mailbox, gpu.executor, gpu.executor.assist_seconds, beside, options.model,
                rows=rows, attention=attention, on_step=status.update,
            )  # fmt: skip
        if batch is None:
            return report
        with gpu.cpu_executor() as cpu:
            iterations = measure_iterations(
                cpu, gpu.executor, cpu.read_seconds, beside, report.quiet, batch,
                config.page_bytes // config.page_tokens, on_step=status.update,
            )  # fmt: skip
        return msgspec.structs.replace(report, iterations=iterations)


def batches_beside(config: EngineConfig, decodes: tuple[int, int], chunk: int) -> dict[str, Batch]:
    """The GPU's own steps, by name. decodes: rows, and tokens of each; chunk: tokens of a prompt.

    Raises `ConfigError` naming the option that does not fit.
    """
    _require_length("--decode-context", decodes[1], config)
    _require_length("--chunk", chunk, config)
    room = Room.of(config, "gpu", config.gpu_pages or 0)
    made = {
        "decodes": make_batch("gpu_decode", decodes[0], decodes[0] * decodes[1], room),
        "prompts": make_batch("gpu_prefill", chunk, 0, room),
    }
    beside = {name: batch for name, batch in made.items() if batch is not None}
    if missing := made.keys() - beside.keys():
        raise ConfigError(f"--gpu-kv-tokens has no room for the {' and '.join(missing)} beside")
    return beside


def with_host_batch(
    config: EngineConfig, host: tuple[int, int]
) -> tuple[EngineConfig, Batch | None]:
    """The configuration with as many host pages as the CPU engine's batch takes, and the batch.

    host: rows, and tokens of each; there is no batch without rows. Raises `ConfigError` naming the
    option that does not fit.
    """
    rows, context = host
    pages = rows * pages_for(context, config.page_tokens)
    if pages > config.host_pages:
        raise ConfigError(
            f"{rows} rows of {context} tokens take {format_size(pages * config.page_bytes)}, "
            "more than the host has to spare: --host-rows, --host-context"
        )
    config = msgspec.structs.replace(config, host_pages=pages)
    if not rows:
        return config, None
    _require_length("--host-context", context, config)
    room = Room.of(config, "host", pages)
    return config, make_batch("cpu_iteration", rows, rows * context, room)


def _require_length(option: str, tokens: int, config: EngineConfig) -> None:
    if tokens > config.max_model_len:
        raise ConfigError(
            f"{option} {tokens} is longer than a request may be: {config.max_model_len} tokens"
        )


def _show(report: AssistReport) -> None:
    console = table_console()
    table = Table(title=f"{report.model}: dense work of a layer, µs", title_justify="left")
    for column in ("rows", "work", "copies", "a turn's excess"):
        table.add_column(column, justify="right")
    for work in report.work:
        cells = (work.layer, work.copies, work.over)
        table.add_row(str(work.rows), *(f"{each * 1e6:.0f}" for each in cells))
    console.print(table)
    quiet = ", ".join(f"{name} {each * 1e3:.2f} ms" for name, each in report.quiet.items())
    table = Table(title=f"turns; the GPU's own steps alone: {quiet}", title_justify="left")
    for column in ("rows", "attention ms", "beside", "launch ms", "turn µs", "p90", "last ms",
                   "iteration ms", "step ms", "slower by"):  # fmt: skip
        table.add_column(column, justify="right")
    for each in report.turns:
        step, slowdown = each.step, each.slowdown
        table.add_row(
            f"{each.slots} × {each.rows}", f"{each.attention * 1e3:g}", each.beside,
            f"{each.launch * 1e3:.2f}", f"{each.turn * 1e6:.0f}", f"{each.turn_p90 * 1e6:.0f}",
            f"{each.last * 1e3:.2f}", f"{each.iteration * 1e3:.1f}",
            "" if step is None else f"{step * 1e3:.2f}",
            "" if slowdown is None else f"{slowdown:.1%}",
        )  # fmt: skip
    console.print(table)
    if not report.iterations:
        return
    table = Table(title="whole iterations of the CPU engine", title_justify="left")
    for column in ("rows × tokens", "route", "beside", "ms", "GB/s", "of read", "step ms",
                   "slower by"):  # fmt: skip
        table.add_column(column, justify="right")
    for whole in report.iterations:
        step, slowdown = whole.step, whole.slowdown
        table.add_row(
            f"{whole.rows} × {whole.tokens:,}", whole.route, whole.beside,
            f"{whole.seconds * 1e3:.0f}", f"{whole.gb_s:.1f}", f"{whole.fraction:.0%}",
            "" if step is None else f"{step * 1e3:.2f}",
            "" if slowdown is None else f"{slowdown:.1%}",
        )  # fmt: skip
    console.print(table)
