"""A stored profile: measured points under the fingerprint of what they were measured on.

Files in the user's cache directory, one for each fingerprint. Measures nothing, predicts nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import Point
from dualpace.profile.fingerprint import MODEL_FIELDS, Fingerprint, require_same


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is its name as the user wrote it, `date` ISO 8601, `*_kv_tokens` the KV room that
    there was in each tier, `copy_bandwidth` bytes per second between them. `note` says where the
    numbers come from if they were not measured here, else it is empty. `options` are those of
    `EngineOptions` that were not left at their defaults, where they have to do with measuring and
    the fingerprint does not know them."""

    model: str
    date: str
    fingerprint: Fingerprint
    gpu_kv_tokens: int
    host_kv_tokens: int
    points: tuple[Point, ...]
    copy_bandwidth: float = 25e9
    note: str = ""
    options: dict[str, str | int] = {}

    @property
    def flags(self) -> str:
        """The options as on a command line, for people."""
        written = (f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())
        return " ".join(written) or "default options"

    def not_again(self, earlier: Profile) -> list[Point]:
        """Points of `earlier` that were not measured again for this one."""
        new = {(p.operation, p.size, p.context) for p in self.points}
        return [p for p in earlier.points if (p.operation, p.size, p.context) not in new]

    def keeping(self, old: Iterable[Point]) -> Profile:
        """This profile with those points as well."""
        return msgspec.structs.replace(self, points=_in_order((*self.points, *old)))


def cache_folder() -> Path:
    """Where this user's profiles are."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dualpace" / "profiles"


def path_of(fingerprint: Fingerprint) -> Path:
    """The file in which the profile of `fingerprint` is, or would be."""
    return cache_folder() / f"{fingerprint.hash}.json"


def save(profile: Profile) -> Path:
    """Write the profile to its place, all of it or nothing; returns the place."""
    path = path_of(profile.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(text + b"\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def load(path: Path) -> Profile:
    """The profile in a file. Raises `ConfigError` if there is none, or it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a profile: {error}") from None


def find(here: Fingerprint) -> Profile:
    """The stored profile that was measured on just this.

    Raises `ConfigError` if there is none; where the same model has been measured under other
    circumstances, the message names what is different.
    """
    path = path_of(here)
    if path.exists():
        profile = load(path)
        require_same(profile.fingerprint, here)
        return profile
    for other in _stored():
        if all(getattr(other.fingerprint, n) == getattr(here, n) for n in MODEL_FIELDS):
            require_same(other.fingerprint, here)
    raise ConfigError(
        "this model has not been profiled on this machine; `dualpace profile run MODEL` does it"
    )


def _stored() -> Iterator[Profile]:
    for path in sorted(cache_folder().glob("*.json")):
        with contextlib.suppress(ConfigError):
            yield load(path)


def _in_order(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple(sorted(points, key=lambda p: (p.operation, p.size, p.context)))
