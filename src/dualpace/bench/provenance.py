"""Which DualPace made a report: its version, and the commit where it runs from a git checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dualpace.core.version import __version__

PACKAGE = Path(__file__).parents[1]


def describe_commit() -> str | None:
    """The short hash, with a + where files of the package differ from it; None outside of git."""
    # A package that was installed into somebody else's repository is not tracked there.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git("rev-parse", "--short=10", "HEAD")
    return commit and commit + ("+" if _git("status", "--porcelain", "-uno", ".") else "")


def describe_version() -> str:
    """Version and commit: "0.1.0 (8c5eb3b0aa)"."""
    commit = describe_commit()
    return f"{__version__} ({commit})" if commit else __version__


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments],
            capture_output=True, text=True, timeout=10.0, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
