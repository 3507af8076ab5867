"""The folder of shards from URLs: who is at work on a file, and room for one more."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file of a folder that others may write; as an `opener`.

    Raises:
        OSError: for a link, which may lead to any file, and for a pipe, of which reading would wait.
    """
    fd = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
    return fd


def claim(file: BinaryIO) -> bool:
    """Return whether nobody else holds the file. The lock ends with the file or the process, however that ends."""
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


def make_room(folder: Path, most: int, spare_s: float) -> int:
    """Remove parts that nobody works on, then the least recently used shards; return the bytes that are still too many.

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
