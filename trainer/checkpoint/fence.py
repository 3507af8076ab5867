"""Fences a run: only the process that began last may commit, on any host, with or without locks. Standard library only.

A lock alone is not enough, because a suspended process may lose its lock, or have none, and continue later.
"""

import errno
import os
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

from trainer import timeouts
from trainer.errors import ConfigError
from trainer.files import sync

ATTEMPT = "ATTEMPT"
MOST = 999_999_999  # after this number, which a foreign folder may contain, the count restarts from 1
LENGTH = 256  # bytes of the file: the text, padded with spaces
TEXT = re.compile(r"attempt ([0-9]{1,9}), process [0-9]+ on [A-Za-z0-9._-]+")


class Attempt(NamedTuple):
    number: int  # how many processes have begun to write the run, including this one
    text: str


class Superseded(ConfigError):
    """Another process writes the run now. This process is not restarted, because that would take the run back."""


def next_attempt(run_dir: Path) -> Attempt:
    """Record on disk that this process begins. The caller holds the lock.

    If two processes begin at once without a lock, one of them is refused later. The file is overwritten in place, which
    works on a full disk, too.
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
    """Raise Superseded if another attempt has begun since `own`."""
    last = _last(run_dir)
    if last != own and last.number:
        raise Superseded(
            f"trainer.checkpoint.dir={run_dir.parent}: {last.text}, writes the run {run_dir.name} now; this is "
            f"{own.text}, which was replaced and ends; nothing needs to be done"
        )


def see_attempt(run_dir: Path, attempt: Attempt) -> bool:
    """Return whether this process sees rank 0's attempt, which a network file system may show late."""
    deadline = time.monotonic() + timeouts.VISIBLE_S
    while (seen := _last(run_dir) == attempt) is False and time.monotonic() < deadline:
        time.sleep(timeouts.VISIBLE_EVERY_S)
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
