"""The directory that holds a server's sockets and its engines' last words, and its removal.

It has a random name and is open to its user only, so nobody else can speak to the engines. Whoever
made it removes it; if that process is killed, its engines do (`remove`); if they are killed as
well, the next server of the same user does. Knows nothing of what lies in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "dualpace-"
LOCK = "lock"  # locked by the process that made the directory for as long as it lives


class RuntimeDirectory:
    """A new one, until `close`. Removes what dead servers have left."""

    def __init__(self) -> None:
        _remove_stale(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._lock = os.open(self.path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # the disk is full
            remove(self.path)
            raise
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "new").rename(self.path / LOCK)  # unlocked, it would look stale

    def close(self) -> None:
        remove(self.path)
        os.close(self._lock)


def remove(path: Path) -> None:
    """Remove a runtime directory, which others may be removing too."""
    shutil.rmtree(path, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    for lock in folder.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(lock.parent)
            finally:
                os.close(descriptor)
