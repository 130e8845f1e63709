"""This process's control groups: where the kernel says how much of the machine it may use.

Finds folders and reads files; what a limit means is for `threads` and `memory` to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")  # where /proc and /sys are found


def control_groups(controller: str, system: Path = SYSTEM) -> Iterator[Path]:
    """Folders of this process's control group and its ancestors, those that rule `controller`
    ("cpu", "memory"), in version 2 and version 1 hierarchies."""
    own: dict[str, str] = {}  # controller ("" for version 2) to group
    for line in read_text(system / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), group))
    for line in read_text(system / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            name = ""
        elif kind == "cgroup" and controller in options.split(","):
            name = controller
        else:
            continue
        if name not in own:
            continue
        mount = system / mount_point.lstrip("/")
        # Inside a container the mount may show a subtree only, or the group may lie outside of it.
        path = PurePosixPath(own[name])
        relative = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath(".")
        for part in (relative, *relative.parents):
            yield mount / part


def read_text(path: Path) -> str:
    """The file's text, empty if it cannot be read: files come and go with kernel and container."""
    try:
        return path.read_text()
    except OSError:
        return ""
