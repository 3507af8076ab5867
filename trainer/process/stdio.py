"""Keeps a run alive if standard input, output or error is closed or loses its reader."""

import contextlib
import errno
import io
import os
import sys

from trainer.log import log

SHOW_CURSOR = b"\x1b[?25h"


def open_standard_descriptors() -> None:
    """Open /dev/null for closed descriptors 0 to 2, before another file takes their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(descriptor, True)


def show_cursor() -> None:
    """Show the cursor, which a progress bar hides, before the process ends without clean-up."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR + b"\r\n")


class Output(io.TextIOWrapper):
    """Standard output or error that outlives its reader (`| head`, a closed ssh session): later text is dropped.

    The loss is logged once. Python ignores SIGPIPE, so a write raises instead. On a full disk, only text written while
    it is full is lost. A logging handler would not be enough, because a recipe's `print`, the progress bar and the help
    write to `sys.stdout` directly.
    """

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # the buffered text goes there
        os.close(null)
        log.info("%s is closed (%s): the run continues; see metrics.jsonl and logs/", self.name, error.strerror)


def tolerate_closed_pipes() -> None:
    """Replace `sys.stdout` and `sys.stderr` with `Output`, which also prints names that are not UTF-8.

    Text for a closed one (`>&-`) is dropped. Standard error is line-buffered even with PYTHONUNBUFFERED, so that lines
    of ranks that fail together do not mix. A second call changes nothing.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, Output):  # replacing it would close the descriptor once it is garbage-collected
            continue
        if old is None:
            new = open(os.devnull, "w")  # noqa: SIM115 it stays open
        else:
            by_line, direct = name == "stderr" or old.line_buffering, name == "stdout" and old.write_through
            new = Output(reopened(old, direct), old.encoding, "backslashreplace", None, by_line, direct)
        setattr(sys, name, new)


def reopened(stream: io.TextIOWrapper, direct: bool) -> io.FileIO | io.BufferedWriter:
    """Reopen a stream's descriptor, which in a rank may be a pipe now and have been a file before the fork."""
    stream.flush()
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    return raw if direct else io.BufferedWriter(raw)
