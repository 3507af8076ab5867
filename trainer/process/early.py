"""Handles SIGTERM while the command's modules are imported, with the same exit code as later in a run."""

import os
import signal
import sys

from trainer.errors import STOPPED
from trainer.process.environment import is_launched


def stop_early() -> None:
    """Handle SIGTERM until `StartupSignals` takes over, if this process is the command."""
    if os.path.basename(sys.argv[0]) in ("echelon", "main.py") or sys.argv[0] == "-m":
        signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    if not is_launched():
        os.write(2, b"echelon: SIGTERM: stopped before the first step\n")
    os._exit(STOPPED)
