"""Standard output and error whose reader may go, and the terminal's cursor."""

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from trainer.process.signals import log

if TYPE_CHECKING:
    pass


SHOW_CURSOR = b"\x1b[?25h"


def show_cursor() -> None:
    """A progress bar hides it, and a process that is ended at once can't put it back."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR + b"\r\n")


class Output(io.TextIOWrapper):
    """Standard output or error whose reader may go (`| head`, a closed ssh session): what follows is lost, no more.

    The log says so once. Python ignores SIGPIPE, so that a write raises instead. Into a file on a disk that is full
    nothing more is lost than what comes meanwhile.
    """

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # what is still buffered goes there
        os.close(null)
        log.info("%s is closed (%s): the run goes on, see metrics.jsonl and logs/", self.name, error.strerror)


def outlive_readers() -> None:
    """From now on `sys.stdout` and `sys.stderr` are `Output`, also of names that are not UTF-8; where a shell has
    closed one (`>&-`), nowhere."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        new = (
            open(os.devnull, "w")  # noqa: SIM115 it stays open
            if old is None
            else Output(old.buffer, old.encoding, "backslashreplace", None, old.line_buffering, old.write_through)
        )
        setattr(sys, name, new)
