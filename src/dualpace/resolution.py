"""Settles options: what a user wrote becomes what the engines get, every "auto" resolved.

Knows checkpoints, memory, cores, devices and profiles, but starts nothing.
"""

from __future__ import annotations

import logging

from dualpace.core.config import (
    Device,
    DType,
    EngineConfig,
    EngineOptions,
    format_size,
    parse_size,
)
from dualpace.core.errors import ConfigError, HardwareError
from dualpace.core.model_spec import ModelSpec
from dualpace.core.plan import Route
from dualpace.cpu._native import supported_isas
from dualpace.cpu.memory import available_memory, host_pages
from dualpace.cpu.threads import allowed_cores, choose_cores
from dualpace.gpu.device import cuda_device_count
from dualpace.kv.pages import pages_for
from dualpace.models.registry import resolve as resolve_source
from dualpace.models.spec import load_spec
from dualpace.policy.registry import uses_host
from dualpace.profile.fingerprint import Fingerprint, take_fingerprint
from dualpace.profile.settle import settle

logger = logging.getLogger(__name__)

ELEMENT_BYTES: dict[DType, int] = {"bfloat16": 2, "float32": 4}
# Long steps hold decodes up: 26 ms for 1,024 tokens of an 8B model on an H200, a quarter of a
# second for 256 of a small one on the stand-in, which beyond that outgrow its cache.
BATCHED_TOKENS: dict[Device, int] = {"cuda": 1024, "cpu": 256}
ENGINES_BYTES = 512 * 2**20  # that both engines' processes take beside weights and KV, at least
STANDIN_SEQUENCES = 8  # full-length sequences in the stand-in's pool where there is no host pool


def resolve(options: EngineOptions, *, to_measure: bool = False) -> tuple[EngineConfig, ModelSpec]:
    """Settle every "auto" and check what can be checked before anything is started.

    to_measure: for a profile, so without regard to one.
    Raises `ConfigError`, `ModelError` or `HardwareError`, each naming what to change.
    """
    source = resolve_source(options.model)
    spec = load_spec(source)
    device = device_of(options)
    dtype: DType = "bfloat16" if options.dtype == "auto" else options.dtype
    page_bytes = spec.page_bytes(options.page_tokens, ELEMENT_BYTES[dtype])
    max_model_len = options.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {spec.max_position_embeddings} "
            f"positions that {options.model} was made for"
        )
    pages_per_sequence = pages_for(max_model_len, options.page_tokens)
    weight_bytes = spec.num_parameters * ELEMENT_BYTES[dtype]
    # In gated steps the GPU does all dense work; a profile tells of the host by itself as well.
    host_weights = options.host_weights == "auto" and (options.policy != "gated" or to_measure)
    gpu_pages: int | None = None
    standin_kv = 0  # bytes that are asked for, of the same memory
    if options.gpu_kv_tokens is not None:
        gpu_pages = options.gpu_kv_tokens // options.page_tokens
        if device == "cpu":
            standin_kv = gpu_pages * page_bytes
            _require_room(gpu_pages, options.page_tokens, page_bytes)
    pages = 0
    if uses_host(options.policy):
        asked = (
            None
            if options.host_kv_size == "auto"
            else parse_size(options.host_kv_size, "host-kv-size")
        )
        reserved = ((device == "cpu") + host_weights) * weight_bytes + standin_kv + ENGINES_BYTES
        most = pages_per_sequence * options.max_num_seqs
        pages = host_pages("host-kv-size", asked, page_bytes, reserved, most)
    cores = choose_cores(options.cpu_cores)
    if gpu_pages is None and device == "cpu":
        # Prompts keep the stand-in busy, and decodes in their steps would wait for them.
        decodes = not pages or options.policy == "gated"
        gpu_pages = pages_per_sequence * STANDIN_SEQUENCES if decodes else 0
        _require_room(gpu_pages, options.page_tokens, page_bytes)
    if gpu_pages == 0 and pages == 0:
        raise ConfigError(
            "there is no room for KV: --gpu-kv-tokens and --host-kv-size are both less than a page "
            f"({options.page_tokens} tokens, {format_size(page_bytes)})"
        )
    if options.policy == "gated" and 0 in (pages, gpu_pages):
        flag = "--gpu-kv-tokens" if pages else "--host-kv-size"
        raise ConfigError(f"--policy gated needs KV room on both sides: {flag} is less than a page")
    # On the stand-in a step planned ahead only makes new requests wait longer.
    overlapped = options.async_scheduling
    if overlapped is None:
        overlapped = device == "cuda"
    config = EngineConfig(
        model=options.model,
        load_format=options.load_format,
        dtype=dtype,
        device=device,
        policy=options.policy,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or BATCHED_TOKENS[device],
        steps_in_flight=2 if overlapped else 1,
        page_tokens=options.page_tokens,
        page_bytes=page_bytes,
        gpu_pages=gpu_pages,
        gpu_memory_utilization=options.gpu_memory_utilization,
        gpu_threads=max(1, len(allowed_cores()) - len(cores)) if pages else len(cores),
        host_pages=pages,
        cpu_ids=cores,
        cpu_isa=options.cpu_isa,
        cpu_routes=_routes(options, device, dtype) if pages else ("local",),
        host_weights=host_weights,
        seed=options.seed,
        timeline=options.timeline,
    )
    if not to_measure:
        config = settle(options, config, fingerprint_of(config, spec), weight_bytes)
        pages = config.host_pages
    level = logging.DEBUG if to_measure else logging.INFO
    logger.log(
        level,
        "%s: %s, %s on %s; pages of %d tokens (%s); host KV %s = %d tokens; CPU engine on cores %s",
        options.model, spec.architecture, dtype, device, options.page_tokens,
        format_size(page_bytes), format_size(pages * page_bytes), pages * options.page_tokens,
        ", ".join(map(str, cores)),
    )  # fmt: skip
    return config, spec


def _require_room(gpu_pages: int, page_tokens: int, page_bytes: int) -> None:
    """Raises `ConfigError` where the stand-in's pool alone is more than the memory that is left."""
    needed = gpu_pages * page_bytes
    if needed > (left := available_memory()):
        raise ConfigError(
            f"--gpu-kv-tokens {gpu_pages * page_tokens} takes {format_size(needed)} on the "
            f"stand-in for a GPU, {format_size(left)} are left"
        )


def _routes(options: EngineOptions, device: Device, dtype: DType) -> tuple[Route, ...]:
    """Those that the CPU engine may choose from. On the stand-in, which shares the host's memory
    with it, an assist has nothing to give."""
    if device == "cuda" and dtype != "bfloat16":
        if options.policy == "gated":
            raise HardwareError(f"a GPU has no gated steps in {dtype}: --policy dualpace")
        if options.cpu_route not in ("auto", "local") or options.host_weights == "none":
            raise HardwareError(f"a GPU does not assist in {dtype}: --cpu-route local")
        return ("local",)
    asked_for = options.cpu_route not in ("auto", "local") or options.host_weights == "none"
    if device == "cpu" and asked_for:
        logger.warning(
            "without a GPU an assist shows that it works and no more: torch computes it on the "
            "host's own cores, which is slow; --cpu-route local is faster"
        )
    if options.cpu_route != "auto":
        return (options.cpu_route,)
    if options.policy == "gated" or options.host_weights == "none":
        return ("assist", "assist2")
    return ("local", "assist", "assist2") if device == "cuda" else ("local",)


def fingerprint_of(config: EngineConfig, spec: ModelSpec) -> Fingerprint:
    """What a profile must have been measured on, to hold for this configuration."""
    isa = supported_isas()[-1] if config.cpu_isa == "auto" else config.cpu_isa
    return take_fingerprint(config, spec, isa)


def device_of(options: EngineOptions) -> Device:
    if options.device == "cpu":
        return "cpu"
    if cuda_device_count() > 0:
        return "cuda"
    if options.device == "cuda":
        raise HardwareError("--device cuda: no NVIDIA GPU is visible to this process")
    return "cpu"
