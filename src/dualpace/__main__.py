"""The `dualpace` program; also `python -m dualpace`.

Its parts are imported here and not above: that takes a second, in which Ctrl-C is to end it as
quietly as later.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit code 130 at Ctrl-C."""
    try:
        from dualpace.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
