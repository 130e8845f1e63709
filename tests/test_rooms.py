"""Importing the light rooms pulls in nothing heavy. What may import what, import-linter checks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "dualpace",
        "dualpace.loop",
        "dualpace.scheduler.gpu",
        "dualpace.scheduler.cpu",
        "dualpace.policy.registry",
        "dualpace.policy.cost_model",
        "dualpace.assist.mailbox",
        "dualpace.sim.world",
        "dualpace.sim.machine",
        "dualpace.scheduler.gated",
        "dualpace.scheduler.gated_cpu",
        "dualpace.cpu.executor",
        "dualpace.models.weights",
        "dualpace.cli.main",
    ],
)
def test_importing_it_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
