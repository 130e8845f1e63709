"""Options of a server, under vLLM's names where the meaning is vLLM's.

`EngineOptions` is what a user writes: frozen, with "auto" allowed, and the only place that holds a
default (the command line takes its own from here). `EngineConfig` is what the engines get: every
"auto" resolved, by `dualpace.wiring`, and logged once.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from dualpace.core.errors import ConfigError
from dualpace.core.plan import Route

Device = Literal["cuda", "cpu"]
DType = Literal["bfloat16", "float32"]
PolicyName = Literal["dualpace", "gpu-only", "gated"]
POLICIES: tuple[PolicyName, ...] = ("dualpace", "gpu-only", "gated")
ISAS: tuple[str, ...] = ("auto", "portable", "avx2", "avx512", "avx512_bf16")
DTYPES = ("auto", "bfloat16", "float32")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cuda", "cpu")
PAGE_TOKENS = (16, 32, 64)
CPU_ROUTES = ("auto", "local", "assist", "assist2")
HOST_WEIGHTS = ("auto", "none")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may set. Raises `ConfigError` naming the flag when a value cannot work."""

    model: str
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    gpu_kv_tokens: int | None = None
    host_kv_size: str = "auto"
    cpu_cores: int | None = None
    cpu_isa: str = "auto"
    cpu_route: Literal["auto", "local", "assist", "assist2"] = "auto"
    host_weights: Literal["auto", "none"] = "auto"
    policy: PolicyName = "dualpace"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    page_tokens: int = 32
    async_scheduling: bool | None = None
    engine_timeout: float = 30.0  # seconds for a turn of an engine's loop before it counts as hung
    step_timeout: float = 300.0  # seconds for one step or copy before the engine counts as hung
    profile: str = "auto"
    cpu_itl_target: float | None = None
    gpu_itl_target: float | None = None
    timeline: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value, choices in (
            ("policy", self.policy, POLICIES),
            ("dtype", self.dtype, DTYPES),
            ("load-format", self.load_format, LOAD_FORMATS),
            ("device", self.device, DEVICES),
            ("cpu-isa", self.cpu_isa, ISAS),
            ("cpu-route", self.cpu_route, CPU_ROUTES),
            ("host-weights", self.host_weights, HOST_WEIGHTS),
            ("page-tokens", self.page_tokens, PAGE_TOKENS),
        ):
            if value not in choices:
                options = ", ".join(map(str, choices))
                raise ConfigError(f"--{flag} must be one of {options}, got {value!r}")
        for flag, number, least in (
            ("max-model-len", self.max_model_len, 2),
            ("max-num-seqs", self.max_num_seqs, 1),
            ("max-num-batched-tokens", self.max_num_batched_tokens, 1),
            ("gpu-kv-tokens", self.gpu_kv_tokens, 0),
            ("cpu-cores", self.cpu_cores, 1),
        ):
            if number is not None and number < least:
                raise ConfigError(f"--{flag} must be at least {least}, got {number}")
        # A loop that has nothing to do turns once a second.
        for flag, seconds, least in (
            ("engine-timeout", self.engine_timeout, 2),
            ("step-timeout", self.step_timeout, 1),
        ):
            if not seconds >= least:
                raise ConfigError(f"--{flag} must be at least {least} seconds, got {seconds:g}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.policy == "gated" and self.cpu_route == "local":
            raise ConfigError("--policy gated has no CPU iterations: --cpu-route auto")
        if self.host_weights == "none" and self.cpu_route == "local":
            raise ConfigError("--cpu-route local needs weights on the host: --host-weights auto")
        for flag, target in (
            ("cpu-itl-target", self.cpu_itl_target),
            ("gpu-itl-target", self.gpu_itl_target),
        ):
            if target is not None and not 0.0 < target < math.inf:
                raise ConfigError(f"--{flag} must be a positive number of seconds, got {target}")
        if self.host_kv_size != "auto":
            parse_size(self.host_kv_size, "host-kv-size")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What both engines of one server agree on; nothing is left to guess."""

    model: str
    load_format: Literal["auto", "dummy"]
    dtype: DType
    device: Device
    policy: PolicyName
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int  # 2: the GPU engine plans a step while the one before it runs
    page_tokens: int
    page_bytes: int
    gpu_pages: int | None  # None: sized by the GPU engine from the memory that is left
    gpu_memory_utilization: float
    gpu_threads: int  # of the stand-in for a GPU
    host_pages: int
    cpu_ids: tuple[int, ...]  # cores of the CPU engine's thread pool, in order of use
    cpu_isa: str
    cpu_routes: tuple[Route, ...]  # that the CPU engine chooses from
    host_weights: bool  # does the CPU engine have weights? Without them it needs the GPU engine's
    seed: int
    profile_file: str | None = None  # None: nothing was measured
    cpu_itl_target: float | None = None  # seconds; None: rows alone bound the CPU batch
    gpu_itl_target: float | None = None  # seconds; None: what a step full of prompts takes
    timeline: str | None = None  # the folder in which engines leave theirs


def parse_size(text: str, flag: str) -> int:
    """Bytes of "4GiB", "512MiB", "1.5G", "4096". Raises `ConfigError` naming `flag`."""
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    trimmed = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = (trimmed[:-1], trimmed[-1:]) if trimmed[-1:].isalpha() else (trimmed, "")
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"--{flag}: not a size: {text!r} (write it like 4GiB or 512MiB)"
        ) from None
    if size < 0:
        raise ConfigError(f"--{flag}: must not be negative, got {text!r}")
    return size


def format_size(size: int) -> str:
    """`size` bytes for people: "1.5 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"
