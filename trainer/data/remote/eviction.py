"""Locks the files in the folder of downloaded shards, and evicts shards to make room."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file of a folder that other users may write; an `opener` for `open`.

    Raises:
        OSError: The file is a link, which may lead to any file, or a pipe, which would block a reader.
    """
    fd = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
    return fd


def claim(file: BinaryIO) -> bool:
    """Lock the file for this process, and return whether that succeeded. The lock ends with the file or the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def evict(folder: Path, most: int, spare_s: float) -> int:
    """Remove abandoned parts, then the least recently used shards; return the bytes still above `most`.

    A shard stays while it is open, and for `spare_s` after its last use. The caller has the folder's lock.
    """
    now, found = time.time_ns(), []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and path.suffix not in (".idx", ".tmp") and path.name != ".lock":
                found.append((not path.name.startswith("."), status.st_atime_ns, status.st_size, path))
    total = sum(size for _, _, size, _ in found)
    for whole, used, size, path in sorted(found):
        if whole and (total <= most or now - used < spare_s * 1e9):
            break
        with contextlib.suppress(OSError), open(path, "rb", opener=open_regular) as file:
            if claim(file):
                path.unlink()
                total -= size
    return max(0, total - most)
