"""Defines the logger of a run, and its handlers."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.errors import printable
from trainer.redact import redact_text

log = logging.getLogger("echelon")


class Lines(logging.Formatter):
    """Formats a record as text that can't control a terminal, and hides secrets.

    A message is one line, a traceback has several.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = redact_text(printable(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return redact_text(printable(super().formatException(ei), keep="\n"))


class Terminal(logging.Handler):
    """A handler for standard output; while a progress bar is shown, `console` prints above the bar."""

    console: Any = None
    doing = ""  # what the process does beside its steps, for the bar: "validating 3/12"

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
    """Let the progress bar show what the process does beside its steps."""
    before, Terminal.doing = Terminal.doing, what
    try:
        yield
    finally:
        Terminal.doing = before


def set_handlers(*handlers: logging.Handler) -> None:
    """Close the handlers that `log` has, and give it these."""
    for handler in log.handlers:
        handler.close()
    log.handlers = list(handlers)
    log.setLevel(logging.INFO)
    log.propagate = False


def log_to_terminal(rank: int) -> None:
    """Print rank 0's events to the terminal, until there is a folder for the log."""
    set_handlers(logging.NullHandler() if rank else Terminal())


def show(messages: Iterable[tuple[int, str]], rank: int = 0) -> None:
    """Print lines on rank 0's terminal, each with its level."""
    log_to_terminal(rank)
    for level, line in messages:
        log.log(level, "%s", line)


def stop_log() -> None:
    """Close and remove all handlers."""
    set_handlers()
