"""The folder of shards from URLs: who is at work on a file, and room for one more."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO


def claim(file: BinaryIO) -> bool:
    """Whether nobody else holds it; the lock ends with the file, or with the process, however that ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def make_room(folder: Path, most: int, spare_s: float) -> int:
    """Removes parts that nobody works on, then what was used least recently, but not what is open, or was used in the
    last `spare_s`; under the folder's lock. The bytes that are still too many."""
    now, found = time.time_ns(), []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.suffix not in (".idx", ".tmp") and path.name != ".lock":
                status = path.stat()
                found.append((not path.name.startswith("."), status.st_atime_ns, status.st_size, path))
    total = sum(size for _, _, size, _ in found)
    for whole, used, size, path in sorted(found):
        if whole and (total <= most or now - used < spare_s * 1e9):
            break
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if claim(file):
                path.unlink()
                total -= size
    return max(0, total - most)
