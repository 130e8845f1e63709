"""Options that several commands share, declared once.

Typer reads a command's options off its parameters. `takes_options` lets one parameter stand for a
whole group: a dataclass whose fields are declared as Typer's options are. Knows no command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer

from dualpace.core.config import ISAS, EngineOptions
from dualpace.core.errors import ConfigError, DualPaceError

Result = TypeVar("Result")
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineOptions)}
MODEL_HELP = "Alias (smollm2), .gguf file, or Hugging Face checkpoint directory."

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
GpuKvTokens = Annotated[
    int | None,
    typer.Option(
        help="KV room on the GPU, in tokens. Default: the memory left; without a GPU 0, where the "
        "host has room."
    ),
]
HostKvSize = Annotated[str, typer.Option(help="KV room on the host, such as 40GiB, or auto.")]
CpuCores = Annotated[
    int | None, typer.Option(help="Cores of the CPU engine. Default: all but a small reserve.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus output. Default: the model's own limit.")
]
HostWeights = Annotated[
    str, typer.Option(help="auto, or none: the host has KV only, and the GPU engine assists.")
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")]


@dataclass(frozen=True)
class EngineFlags:
    """Everything in `EngineOptions` but the model, for commands that start engines."""

    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the API and in reports. Default: MODEL as given.")
    ] = None
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if not the model's.")] = None
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init",
            help="Run without a tokenizer: prompts must be token ids, and output has no text.",
        ),
    ] = DEFAULTS["skip_tokenizer_init"]
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = DEFAULTS["dtype"]
    load_format: LoadFormat = DEFAULTS["load_format"]
    max_model_len: MaxModelLen = None
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in one step of an engine.")] = (
        DEFAULTS["max_num_seqs"]
    )
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens in one GPU step. Default: 1024, 256 on the stand-in."),
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory to use.")
    ] = DEFAULTS["gpu_memory_utilization"]
    gpu_kv_tokens: GpuKvTokens = None
    host_kv_size: HostKvSize = DEFAULTS["host_kv_size"]
    cpu_cores: CpuCores = None
    cpu_isa: Annotated[
        str, typer.Option(help=f"Instruction set of the CPU engine: {', '.join(ISAS)}.")
    ] = DEFAULTS["cpu_isa"]
    cpu_route: Annotated[
        str,
        typer.Option(
            help="Who computes the dense part of the CPU engine's iterations: local, assist (the "
            "GPU engine), assist2 (in two micro-batches) or auto."
        ),
    ] = DEFAULTS["cpu_route"]
    host_weights: HostWeights = DEFAULTS["host_weights"]
    policy: Annotated[
        str, typer.Option(help="dualpace, gpu-only, or gated (NEO's published scheduling).")
    ] = DEFAULTS["policy"]
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = DEFAULTS["device"]
    page_tokens: Annotated[int, typer.Option(help="Tokens in a KV page: 16, 32 or 64.")] = DEFAULTS[
        "page_tokens"
    ]
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="Plan a GPU step while the one before it runs. Default: on a GPU."),
    ] = DEFAULTS["async_scheduling"]
    engine_timeout: Annotated[
        float, typer.Option(help="Seconds without a sign of life until an engine is restarted.")
    ] = DEFAULTS["engine_timeout"]
    step_timeout: Annotated[
        float, typer.Option(help="Seconds that one step may take until its engine is restarted.")
    ] = DEFAULTS["step_timeout"]
    profile: Annotated[
        str,
        typer.Option(
            help="A profile's .json file; auto for the stored one of this machine and model, on a "
            "GPU measured first if there is none; none for rules that need none."
        ),
    ] = DEFAULTS["profile"]
    cpu_itl_target: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a token may take on the CPU engine. Default: from the profile."
        ),
    ] = DEFAULTS["cpu_itl_target"]
    gpu_itl_target: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a GPU step with decodes may take: paces prompts. Default: "
            "what a full step takes without the CPU engine; a tenth more is let pass."
        ),
    ] = DEFAULTS["gpu_itl_target"]
    timeline: Annotated[
        str | None,
        typer.Option(
            help="Folder in which each engine, as it ends, writes what it did when, for "
            "chrome://tracing or Perfetto."
        ),
    ] = DEFAULTS["timeline"]
    seed: Annotated[int, typer.Option(help="Seed of dummy weights.")] = DEFAULTS["seed"]

    def options(self, model: str) -> EngineOptions:
        """Raises `ConfigError` naming the flag whose value cannot work."""
        return EngineOptions(model=model, **vars(self))


def takes_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """`command` in the form that Typer reads: the fields of its dataclass parameters as options.

    A name that occurs more than once is one option, which each place gets; the first declares it.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    options: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            options.setdefault(name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = kind
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            options.setdefault(
                field.name,
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=hints[field.name],
                ),
            )

    @functools.wraps(command)
    def run(**given: Any) -> Result:
        arguments = {name: given[name] for name in signature.parameters if name not in groups}
        for name, kind in groups.items():
            fields = dataclasses.fields(kind)
            arguments[name] = kind(**{field.name: given[field.name] for field in fields})
        return command(**arguments)

    run.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in options.items()}
    return run


@contextlib.contextmanager
def written(file: Path) -> Iterator[None]:
    """Raises `DualPaceError` naming the file where writing it fails: on a full disk, say."""
    try:
        yield
    except OSError as error:
        raise DualPaceError(f"cannot write {file}: {error.strerror or error}") from None


@contextlib.contextmanager
def kept(line: str, file: Path | None) -> Iterator[None]:
    """Writes the line to the file, if there is one, at the end: also where what is shown within
    finds stdout closed, or full. Raises as `written` does."""
    try:
        yield
    finally:
        if file:
            with written(file):
                file.write_text(line + "\n", encoding="utf-8")


FIGURES = (".png", ".svg", ".pdf")


def require_writable(*files: Path | None, figure: Path | None = None) -> None:
    """Fail before the work, not after it, where a result could not be written. figure: one that is
    drawn, in the format that its ending tells."""
    wanted = [file for file in (*files, figure) if file]
    for file in wanted:
        if not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: {file.parent} is not a folder")
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"cannot write {file}: that is not allowed")
        if wanted.count(file) > 1:
            raise ConfigError(f"cannot write {file} for two options")
    if figure and figure.suffix.lower() not in FIGURES:
        raise ConfigError(f"cannot draw {figure}: its name must end in {', '.join(FIGURES)}")
