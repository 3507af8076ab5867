"""The logger of a run, and what it shows on the terminal."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


log = logging.getLogger("echelon")


def show_log(rank: int) -> None:
    """Rank 0's events to the terminal, until `start_log` knows of a folder for them too."""
    stop_log()
    log.handlers = [logging.NullHandler() if rank else Terminal()]
    log.setLevel(logging.INFO)
    log.propagate = False


def stop_log() -> None:
    for handler in log.handlers:
        handler.close()
    log.handlers = []


class Terminal(logging.Handler):
    """Standard output; while a progress bar is shown, `console` prints above it."""

    console: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        message = (
            record.getMessage()
            if record.levelno < logging.WARNING
            else f"{record.levelname.lower()}: {record.getMessage()}"
        )
        if Terminal.console is not None:
            Terminal.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, flush=True)
