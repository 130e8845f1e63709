"""`dualpace bench kernels`: what the CPU kernels reach of this machine's memory bandwidth.

Chooses and shows; the work is done by `cpu.kernel_bench` and, for the comparison with torch, by
`profile.torch_linear`. Progress goes to stderr, tables to stdout, and one line of JSON last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dualpace.cli.errors import explained
from dualpace.cli.options import JsonFile, require_writable
from dualpace.cli.tables import print_json, table_console
from dualpace.core.config import format_size

if TYPE_CHECKING:
    from dualpace.cpu.kernel_bench import KernelReport

TORCH_SECONDS, TORCH_SECONDS_QUICK = 1.2, 0.36


def kernels(
    cpu_cores: Annotated[
        int | None, typer.Option(min=1, help="Threads. (default: all cores but a reserve)")
    ] = None,
    cpu_isa: Annotated[str, typer.Option(help="Instruction set; auto takes the best.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: less memory, fewer sizes, no 8B model.")
    ] = False,
    torch: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Measure torch's linear layers beside.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Measure the CPU engine's kernels on this machine, against its read bandwidth.

    Nothing else should run meanwhile: it would take bandwidth from one side of a comparison.
    """
    errors = Console(stderr=True)
    with explained():
        require_writable(json_file)
        report = _measure(errors, cpu_cores, cpu_isa, quick, torch)
    from dualpace.bench.hardware import describe_machine

    line = json.dumps({"hardware": describe_machine(), **msgspec.to_builtins(report)})
    console = table_console()
    for table in _tables(report):
        console.print(table)
    for note in report.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    with explained():
        print_json(line, json_file)


def _measure(
    console: Console, cpu_cores: int | None, cpu_isa: str, quick: bool, with_torch: bool
) -> KernelReport:
    from dualpace.cpu.kernel_bench import KernelBench  # NumPy and the extension: slow to import
    from dualpace.cpu.threads import choose_cores
    from dualpace.profile.torch_linear import TorchLinear

    cores = choose_cores(cpu_cores)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = bar.add_task("starting", total=None)
        torch_linear = None
        if with_torch:
            seconds = TORCH_SECONDS_QUICK if quick else TORCH_SECONDS
            torch_linear = stack.enter_context(TorchLinear(cores, seconds))

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        bench = KernelBench(cores, cpu_isa, quick=quick, torch_linear=torch_linear, on_step=show)
        return bench.run()


def _tables(report: KernelReport) -> Iterable[Table]:
    threads = f"{report.threads} thread" + "s" * (report.threads != 1)
    yield _table(
        f"memory, read by {threads}",
        ("", "size", "pages", "GB/s", "least", "most"),
        (
            (name, format_size(each.size), each.pages, f"{each.read_gb_s:.1f}",
             f"{each.read_gb_s_least:.1f}", f"{each.read_gb_s_most:.1f}")
            for name, each in (("KV arena", report.arena), ("weights", report.weights))
        ),
    )  # fmt: skip
    yield _table(
        f"{report.isa}: attention, one layer, 8 KV heads of 128, bfloat16",
        ("batch", "G", "ms", "GB/s", "of read", "error"),
        (
            (f"{each.sequences} × {each.tokens:,}", str(each.group), f"{each.seconds * 1e3:.3f}",
             f"{each.gb_s:.1f}", f"{each.fraction:.0%}", f"{each.relative_l2:.1e}")
            for each in report.attention
        ),
    )  # fmt: skip
    yield _table(
        f"{report.isa}: linear layers, bfloat16 (torch in ms too)",
        ("layer", "M", "ms", "GB/s", "of read", "TFLOP/s", "error", "torch eager", "prepacked"),
        (
            (each.layer, str(each.m), f"{each.seconds * 1e3:.2f}", f"{each.gb_s:.1f}",
             f"{each.fraction:.0%}", f"{each.tflop_s:.2f}", f"{each.relative_l2:.1e}",
             _milliseconds(each.torch_eager_seconds), _milliseconds(each.torch_prepacked_seconds))
            for each in report.linear
        ),
    )  # fmt: skip
    others: list[tuple[str, str, str]] = [
        (each.name, f"{each.seconds * 1e6:,.2f}",
         "" if each.relative_l2 is None else f"{each.relative_l2:.1e}")
        for each in report.other
    ]  # fmt: skip
    others.append(("barrier of all threads", f"{report.barrier_seconds * 1e6:,.3f}", ""))
    yield _table("other", ("", "µs", "error"), others)
    if report.iteration is not None:
        each = report.iteration
        yield _table(
            f"a whole iteration: {each.model}",
            ("rows × tokens", "ms", "weights", "KV", "ms at read bandwidth", "of read"),
            [
                (f"{each.rows} × {each.tokens:,}", f"{each.seconds * 1e3:.1f}",
                 format_size(each.weight_bytes), format_size(each.kv_bytes),
                 f"{each.roof_seconds * 1e3:.1f}", f"{each.fraction:.0%}")
            ],
        )  # fmt: skip


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
