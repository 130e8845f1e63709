"""A stored profile: measured points under the fingerprint of what they were measured on.

Files in the user's cache directory, one for each fingerprint. Measures nothing, predicts nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from dualpace.core.config import Device
from dualpace.core.errors import ConfigError, DualPaceError
from dualpace.policy.cost_model import PARTS, Point, TableCostModel
from dualpace.profile.fingerprint import MODEL_FIELDS, Fingerprint, require_same

# Tokens that a device's dense kernels compute together. On an H200 a step with a few tokens more
# takes 10 to 20% longer, and hardly less than one that fills the next tile.
TILES: dict[Device, int] = {"cuda": 64}


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is its name as the user wrote it, `date` ISO 8601, `*_kv_tokens` the KV room that
    there was in each tier, `copy_bandwidth` bytes per second between them. `note` says where the
    numbers come from if they were not measured here, else it is empty. `options` are those of
    `EngineOptions` that were not left at their defaults, where they have to do with measuring and
    the fingerprint does not know them."""

    model: str
    date: str
    fingerprint: Fingerprint
    gpu_kv_tokens: Annotated[int, msgspec.Meta(ge=0)]
    host_kv_tokens: Annotated[int, msgspec.Meta(ge=0)]
    points: tuple[Point, ...]
    copy_bandwidth: Annotated[float, msgspec.Meta(gt=0.0)] = 25e9
    note: str = ""
    options: dict[str, str | int] = {}

    def cost_model(self) -> TableCostModel:
        """What the points tell of other sizes."""
        return TableCostModel(self.points, TILES.get(self.fingerprint.device_kind))

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


def require_place() -> None:
    """Before measuring: raise `ConfigError` where no profile could be stored."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot store profiles in {folder}: {error.strerror}; XDG_CACHE_HOME names another "
            "place"
        ) from None


def save(profile: Profile) -> Path:
    """Write the profile to its place, all of it or nothing; returns the place. Raises
    `DualPaceError` naming the place where that fails."""
    path = path_of(profile.fingerprint)
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text + b"\n")
    except OSError as error:
        raise DualPaceError(
            f"cannot store the profile in {path}: {error.strerror or error}"
        ) from None
    return path


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: Path) -> Profile:
    """The profile in a file. Raises `ConfigError` if there is none, or it is damaged."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a profile: {error}") from None
    # Of a part it may be that it takes no time, of a step it cannot.
    timeless = {point.operation for point in profile.points if not point.seconds} - {*PARTS}
    if timeless:
        raise ConfigError(f"{path} is damaged: {', '.join(sorted(timeless))} in 0 seconds")
    return profile


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
