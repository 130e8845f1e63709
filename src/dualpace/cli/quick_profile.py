"""`python -m dualpace.cli.quick_profile OPTIONS`: half a minute's profile, before a server starts.

Not for people: its one argument is `EngineOptions` as JSON, and it ends with its stdin, a pipe that
closes when the server goes, however it goes. A process of its own, so that nothing of a model or a
device stays in the server's parent process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

import msgspec

from dualpace.cli.errors import explained
from dualpace.cli.logs import set_up_logging
from dualpace.cli.measurement import measure_and_store
from dualpace.core.config import EngineOptions

SECONDS = 30.0


def main() -> None:
    """Measure and store."""
    set_up_logging(logging.WARNING)
    with explained():
        measure_and_store(msgspec.json.decode(sys.argv[1], type=EngineOptions), SECONDS)


def _end_with_stdin() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, name="lifeline", daemon=True).start()
    main()
