"""The C++ code under the sanitizers: no race, no access past an end, no undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Where the address space is laid out too randomly for ThreadSanitizer, it runs without that.
PREFIXES = ([], ["setarch", "-R"])


def tool(name: str) -> str | None:
    """A program of this environment, or else of the system."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def runnable_prefix(compiler: str, sanitizer: str, folder: Path) -> list[str]:
    """What to put before a sanitized program. Skips the test where none can be built or run."""
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() {}\n")
    built = subprocess.run(
        [compiler, f"-fsanitize={sanitizer}", str(source), "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode != 0:
        pytest.skip(f"{compiler} has no -fsanitize={sanitizer} here: {built.stderr[-200:]}")
    for prefix in PREFIXES:
        if not prefix or shutil.which(prefix[0]):
            ran = subprocess.run([*prefix, str(program)], capture_output=True, check=False)
            if ran.returncode == 0:
                return prefix
    pytest.skip(f"programs with -fsanitize={sanitizer} do not run here")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_engine_runs_clean(sanitizer: str, tmp_path: Path) -> None:
    compiler, cmake, ninja = tool(os.environ.get("CXX", "g++")), tool("cmake"), tool("ninja")
    if not (compiler and cmake and ninja):
        pytest.skip("needs g++, cmake and ninja")
    prefix = runnable_prefix(compiler, sanitizer, tmp_path)
    build = tmp_path / "build"
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
         f"-DCMAKE_CXX_COMPILER={compiler}", f"-DDUALPACE_SANITIZE={sanitizer}"],
        [cmake, "--build", str(build)],
        [*prefix, str(build / "test_mailbox")],
        [*prefix, str(build / "test_engine")],
        [*prefix, str(build / "test_kernels")],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{command[0]}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert done.stdout.endswith("all passed\n")
