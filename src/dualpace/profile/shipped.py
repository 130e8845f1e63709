"""The profiles that come with the package, by name. What each is worth its `note` says."""

from __future__ import annotations

from pathlib import Path

from dualpace.core.errors import ConfigError
from dualpace.profile.table import Profile, load

FOLDER = Path(__file__).parent / "shipped"


def shipped_names() -> list[str]:
    """Names that `open_profile` knows."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def open_profile(name_or_file: str) -> Profile:
    """A shipped profile, or the one in a .json file. Raises `ConfigError` if there is none."""
    return load(file_of(name_or_file))


def file_of(name_or_file: str) -> Path:
    """Where `open_profile` looks. Raises `ConfigError` for a name that it does not know."""
    if name_or_file.endswith(".json"):
        return Path(name_or_file)
    if name_or_file not in shipped_names():
        raise ConfigError(
            f"no profile is called {name_or_file!r}: name a .json file (`dualpace profile show "
            f"MODEL` tells where a model's is), or one of {', '.join(shipped_names())}"
        )
    return FOLDER / f"{name_or_file}.json"
