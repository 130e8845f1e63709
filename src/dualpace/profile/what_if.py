"""A profile of a machine that is not there: `host_bandwidth=2x,gpu_kv=48GiB`.

Scales measured seconds and KV rooms, and says so in the profile's note. Measures nothing; a factor
applies to all of an operation's time, be it bound by what was made faster or not.
"""

from __future__ import annotations

import msgspec

from dualpace.core.config import format_size, parse_size
from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import GPU_PARTS, Operation
from dualpace.profile.table import Profile

# What gets faster with each of them.
FASTER: dict[str, tuple[Operation, ...]] = {
    "host_bandwidth": ("cpu_iteration", "cpu_attention"),
    "gpu_bandwidth": ("gpu_decode", *GPU_PARTS),
    "gpu_flops": ("gpu_prefill",),
}
MAX_FACTOR = 1e6  # and its inverse: no times of zero or infinity
ROOMS = {"gpu_kv": "gpu_kv_tokens", "host_kv": "host_kv_tokens"}


def what_if(profile: Profile, text: str) -> Profile:
    """`profile` with what `text` changes. Raises `ConfigError` naming what cannot be read."""
    for change in filter(None, text.split(",")):
        name, _, value = (part.strip() for part in change.partition("="))
        if name in FASTER:
            factor = _factor(name, value)
            profile = msgspec.structs.replace(
                profile,
                points=tuple(
                    msgspec.structs.replace(point, seconds=point.seconds / factor)
                    if point.operation in FASTER[name]
                    else point
                    for point in profile.points
                ),
            )
        elif name == "copy_bandwidth":
            bandwidth = profile.copy_bandwidth * _factor(name, value)
            profile = msgspec.structs.replace(profile, copy_bandwidth=bandwidth)
        elif name in ROOMS:
            tokens = _room(profile, ROOMS[name], name, value)
            profile = msgspec.structs.replace(profile, **{ROOMS[name]: tokens})
        else:
            known = ", ".join((*FASTER, "copy_bandwidth", *ROOMS))
            raise ConfigError(f"--what-if knows {known}, not {name!r}")
    if text:
        note = f"{profile.note} What if {text}.".strip()
        profile = msgspec.structs.replace(profile, note=note)
    return profile


def _factor(name: str, value: str) -> float:
    """ "2x": how many times as fast. A number alone might be meant as gigabytes a second."""
    try:
        factor = float(value.removesuffix("x")) if value.endswith("x") else 0.0
    except ValueError:
        factor = 0.0
    if not 1.0 / MAX_FACTOR <= factor <= MAX_FACTOR:
        raise ConfigError(
            f"--what-if {name}={value}: write how many times as much, like 2x, up to {MAX_FACTOR:g}"
        )
    return factor


def _room(profile: Profile, field: str, name: str, value: str) -> int:
    """Tokens of a KV room given as a size ("48GiB") or as a multiple ("2x")."""
    if value.endswith("x"):
        tokens: int = getattr(profile, field)
        return int(tokens * _factor(name, value))
    page, size = profile.fingerprint.page_bytes, parse_size(value, f"what-if {name}")
    if 0 < size < page:
        raise ConfigError(
            f"--what-if {name}={value} is less than a page ({format_size(page)}): write it like "
            "48GiB"
        )
    return size // page * profile.fingerprint.page_tokens
