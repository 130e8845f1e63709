from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from dualpace.core.garbage import freeze_heap

class Native:
    def __init__(self):
        self.own = self

    def __del__(self, write=os.write):
        write(1, b"freed")

stands = Native()
freeze_heap()
os.write(1, b"served ")
"""


def test_what_is_frozen_is_still_freed_when_the_process_ends() -> None:
    """Else extension modules complain of leaks at the end of every server."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "served freed"
