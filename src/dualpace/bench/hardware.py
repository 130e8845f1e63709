"""One line that says which machine this is, for the figure and the report.

Describes the machine of the *client*: right where the server runs here too, and only there.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from dualpace.core.machine import cpu_name


def describe_machine() -> str:
    """CPU, cores that this process may use, and GPUs if any: "AMD EPYC, 2 cores, no GPU"."""
    cores = len(os.sched_getaffinity(0))
    gpus = _gpu_names()
    return f"{cpu_name()}, {cores} cores, {' + '.join(gpus) if gpus else 'no GPU'}"


def _gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs, by nvidia-smi; empty without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10.0, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
