"""The folder for what recipes prepare once: its place, locks, and writes that survive a power cut."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.data.remote.eviction import open_regular
from trainer.log import log


def root(cache: str | None = None) -> Path:
    """Return the folder `cache`; None: the user's cache folder."""
    return Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "echelon")).expanduser()


@contextmanager
def lock(path: Path, task: str) -> Iterator[None]:
    """Hold the lock file `path`, which stays.

    Args:
        task: The subject of the log's line, if another process has the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", opener=open_regular) as file:  # in a shared cache, a pipe of a neighbour's would not open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process is preparing %s; waiting for it", task, path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Write a file or a folder through to the disk. Without this, a power cut may leave a folder with empty files."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
