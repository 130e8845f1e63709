"""What a profile was measured on; one of another machine, model or version must not be used.

Asks the operating system and the CUDA driver; imports no torch and knows no measurements.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
from typing import Annotated

import msgspec

from dualpace.core.config import Device, EngineConfig
from dualpace.core.errors import ConfigError
from dualpace.core.machine import cpu_name
from dualpace.core.model_spec import ModelSpec
from dualpace.core.version import __version__

Count = Annotated[int, msgspec.Meta(ge=1)]
STAND_IN = "cpu (stand-in)"  # for a GPU


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes how long a step takes. Names are those shown to the user."""

    cpu: str
    cpu_cores: Count
    cpu_isa: str
    device: str
    driver: str
    torch: str
    dualpace: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: Count
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    dtype: str
    page_tokens: Count
    page_bytes: Count

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits, a file name."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    @property
    def device_kind(self) -> Device:
        """What `--device` was when it was measured."""
        return "cpu" if self.device == STAND_IN else "cuda"

    @property
    def hardware(self) -> str:
        """One line for people."""
        return f"{self.cpu}, {self.cpu_cores} cores ({self.cpu_isa}) + {self.device}"


# Fields that say which model was measured, apart from how well the machine runs it.
MODEL_FIELDS = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
    "num_kv_heads", "head_dim", "qkv_bias", "qk_norm", "tie_embeddings",
)  # fmt: skip


def take_fingerprint(config: EngineConfig, spec: ModelSpec, isa: str) -> Fingerprint:
    """The fingerprint of this machine with this configuration; `isa`: with "auto" resolved."""
    device, driver = _cuda_device() if config.device == "cuda" else (STAND_IN, "")
    return Fingerprint(
        cpu=cpu_name(),
        cpu_cores=len(config.cpu_ids),
        cpu_isa=isa,
        device=device,
        driver=driver,
        torch=importlib.metadata.version("torch"),
        dualpace=__version__,
        dtype=config.dtype,
        page_tokens=config.page_tokens,
        page_bytes=config.page_bytes,
        **{name: getattr(spec, name) for name in MODEL_FIELDS},
    )


def first_difference(measured: Fingerprint, here: Fingerprint) -> str | None:
    """The name of the first field in which the two differ, None if they are the same."""
    return next(
        (n for n in measured.__struct_fields__ if getattr(measured, n) != getattr(here, n)), None
    )


def require_same(measured: Fingerprint, here: Fingerprint) -> None:
    """Raise `ConfigError` naming the first difference, if there is one."""
    name = first_difference(measured, here)
    if name is not None:
        raise ConfigError(
            f"the profile is of another {name}: it was measured with {getattr(measured, name)!r}, "
            f"here it is {getattr(here, name)!r}; `dualpace profile run` measures anew"
        )


def _cuda_device() -> tuple[str, str]:
    """Name of the first visible CUDA device, and the CUDA version of its driver ("12.9")."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    handle, version = ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(handle), 0)
    driver.cuDeviceGetName(name, len(name), handle)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return name.value.decode(), f"{version.value // 1000}.{version.value % 1000 // 10}"
