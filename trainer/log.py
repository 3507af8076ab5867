"""Defines the logger of a run, and its handlers."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.errors import printable
from trainer.redact import redact_text

log = logging.getLogger("echelon")


class Lines(logging.Formatter):
    """Formats a record without control characters or secrets. A message is one line; a traceback has several."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = redact_text(printable(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return redact_text(printable(super().formatException(ei), keep="\n"))


class Terminal(logging.Handler):
    """A handler for standard output; while a progress bar is shown, `console` prints above the bar."""

    console: Any = None
    doing = ""  # work between steps, shown in the progress bar: "validating 3/12"

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(Lines())

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        message = f"{prefix}{self.format(record)}"
        if Terminal.console is not None:
            Terminal.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, flush=True)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show in the progress bar what the process does between steps."""
    before, Terminal.doing = Terminal.doing, what
    try:
        yield
    finally:
        Terminal.doing = before


def set_handlers(*handlers: logging.Handler) -> None:
    """Replace the handlers of `log`, and close the old ones."""
    for handler in log.handlers:
        handler.close()
    log.handlers = list(handlers)
    log.setLevel(logging.INFO)
    log.propagate = False


def log_to_terminal(rank: int) -> None:
    """Print rank 0's events to the terminal until the run has a log file."""
    set_handlers(logging.NullHandler() if rank else Terminal())


def show(messages: Iterable[tuple[int, str]], rank: int = 0) -> None:
    """Print messages, each with its level, on rank 0's terminal."""
    log_to_terminal(rank)
    for level, line in messages:
        log.log(level, "%s", line)


def stop_log() -> None:
    """Close and remove all handlers."""
    set_handlers()
