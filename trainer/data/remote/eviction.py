"""Manages the folder of downloaded shards: locks its files, and evicts shards to make room."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import BinaryIO

FOLDER = "echelon-shards"  # in data.cache_dir; nothing outside it is deleted
SHARD = re.compile(r"(\.part-)?[0-9a-f]{64}")  # other files in the folder are not deleted
OWN = re.compile(rf"\.lock|({SHARD.pattern})(\.idx)?")  # everything in the folder except the marker
MARKER = "CACHEDIR.TAG"  # backup programs skip a folder with such a file
TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Shards that Echelon has downloaded or unpacked, and deletes.\n"


def make_folder(folder: Path) -> None:
    """Make the folder of shards with its marker, which a program that deletes old files may have removed.

    Raises:
        OSError: The folder can't be made, is a link, or contains other files but no marker.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "is a link; remove it", str(folder))
    if is_regular(folder / MARKER):
        return
    foreign = any(name != MARKER and not OWN.fullmatch(name) for name in os.listdir(folder))
    if (foreign or (folder / MARKER).is_symlink()) and not is_regular(folder / MARKER):  # another process may mark it
        raise OSError(errno.EEXIST, f"holds files, and no {MARKER} of Echelon's; move them", str(folder))
    with open(folder / MARKER, "wb", opener=open_regular) as file:
        file.write(TAG)


def is_regular(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file in a folder that other users may write to: not a link or a pipe. An `opener` for `open`."""
    fd = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
    return fd


def claim(file: BinaryIO) -> bool:
    """Try to lock a file until it is closed. Return false if another process has locked it."""
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
    """Remove abandoned parts, then the least recently used shards. Return the bytes still above `most`.

    Only regular files that match `SHARD` are counted and removed. A shard stays while it is open, and for `spare_s`
    after its last use. The caller has locked the folder.
    """
    now, found = time.time_ns(), []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and SHARD.fullmatch(path.name):
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
