"""The `dualpace` program; also `python -m dualpace`.

Its parts are imported here and not above: that takes a second, in which Ctrl-C is to end it as
quietly as later.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; exit code 130 at Ctrl-C."""
    _open_standard_streams()
    try:
        from dualpace.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


def _open_standard_streams() -> None:
    """A standard stream that was closed gets /dev/null: its number would go to the next socket or
    memory, which engines would then take for where they print."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    main()
