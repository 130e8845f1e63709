"""The process of one engine; started by the supervisor, not by people."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys

from dualpace.cli.logs import set_up_logging
from dualpace.wiring import run_engine

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # its parent's, which may let requests end first
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks an engine that hangs where
    set_up_logging(logging.INFO)
    run_engine(sys.argv[1])
