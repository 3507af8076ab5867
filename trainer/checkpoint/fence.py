"""The process that began last writes a run: a commit of one before it is refused, on any host, locks or not. Standard
library only.

A lock is no fence: a process that is stopped on a host that loses it, or where files can't be locked, goes on later.
"""

import errno
import os
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import sync
from trainer.errors import ConfigError

ATTEMPT = "ATTEMPT"
MOST = 999_999_999  # then it counts from 1 again: a stranger's folder may say so
LENGTH = 256  # of its text, with spaces behind it
TEXT = re.compile(r"attempt ([0-9]{1,9}), process [0-9]+ on [A-Za-z0-9._-]+")


class Attempt(NamedTuple):
    number: int  # of processes that have begun to write the run, this one included
    text: str


class Superseded(ConfigError):
    """Another process writes the run now. Another attempt of this one would take the run back."""


def next_attempt(run_dir: Path) -> Attempt:
    """Write down durably that this process begins. Call it with the lock held.

    If two processes begin at once without a lock, one of them is refused later. The file is written in place, for
    which a full disk has room.
    """
    number = _last(run_dir).number % MOST + 1
    host = re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname()[:100])
    own = Attempt(number, f"attempt {number}, process {os.getpid()} on {host}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(run_dir / ATTEMPT, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ELOOP, errno.ENXIO):  # another user's, a link, a pipe
            raise
        os.unlink(run_dir / ATTEMPT)
        file = os.open(run_dir / ATTEMPT, flags | os.O_EXCL, 0o644)
    try:
        os.write(file, own.text.ljust(LENGTH).encode())
        os.ftruncate(file, LENGTH)
        os.fsync(file)
    finally:
        os.close(file)
    sync(run_dir)
    return own


def refuse_superseded(run_dir: Path, own: Attempt) -> None:
    """Refuse to go on if another process writes the run.

    Raises:
        Superseded: another attempt has begun since.
    """
    last = _last(run_dir)
    if last != own and last.number:
        raise Superseded(
            f"trainer.checkpoint.dir={run_dir.parent}: {last.text}, writes the run {run_dir.name} now, and this is "
            f"{own.text}, which was taken for dead; it ends here, nothing is to be done"
        )


def see_attempt(run_dir: Path, attempt: Attempt) -> bool:
    """Return whether this process sees another's attempt, which a network's disk may show late."""
    deadline = time.monotonic() + manifest.VISIBLE_S
    while (seen := _last(run_dir) == attempt) is False and time.monotonic() < deadline:
        time.sleep(manifest.EVERY_S)
    return seen


def _last(run_dir: Path) -> Attempt:
    try:
        file = os.open(run_dir / ATTEMPT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return Attempt(0, "")
        raise
    try:
        text = os.read(file, LENGTH).decode("ascii", "replace").rstrip()
    finally:
        os.close(file)
    match = TEXT.fullmatch(text)
    return Attempt(int(match[1]), text) if match else Attempt(0, "")
