"""Examines folders: free space, and the speed of a small file. A dead file system costs no more than a time limit."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trainer import timeouts
from trainer.tools.doctor.finding import ERROR, OK, WARNING, Finding, in_time, size

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 4 * MIB  # bytes of a write
BYTES = 32 * MIB  # of the file that is written and read
SLOW = 50 * MIB  # bytes per second


def examine(folder: Path) -> Iterator[Finding]:
    """Yield findings about `folder`, for checkpoints and logs, and TMPDIR, for sockets and programs."""
    temporary = Path(tempfile.gettempdir())
    for subject, place, count in ((f"disk of {folder}", folder, BYTES), (f"TMPDIR {temporary}", temporary, 1)):
        late = Finding(
            subject, f"no answer within {timeouts.DISK_S:g} s", ERROR, "checkpoints would wait, too",
            "see whether the file system is mounted and its server runs",
        )  # fmt: skip
        yield from in_time(timeouts.DISK_S, late, tried(subject, place, count))


def tried(subject: str, folder: Path, count: int) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
        count = max(1, min(count, free // 2))
        write_s, read_s = speed(folder, count)
    except OSError as error:
        yield Finding(
            subject, error.strerror or str(error), ERROR, "a run can't write its files",
            "make room or make it writable, or name another folder by --folder",
        )  # fmt: skip
        return
    data: dict[str, Any] = {"free": free}
    value, level, consequence, way_out = f"{size(free)} free", OK, "", ""
    if count > MIB:
        written, read = count / write_s, count / read_s
        data |= {"write": written, "read": read}
        value += f", writes {size(written)}/s, reads {size(read)}/s"
        if written < SLOW:
            level, consequence = WARNING, f"a checkpoint of 1 GiB takes {GIB / written:.0f} s"
            way_out = "write to a local disk: trainer.checkpoint.dir"
    if free < GIB:
        level, consequence, way_out = WARNING, "checkpoints may not fit", "make room, or give trainer.checkpoint.dir"
    yield Finding(subject, value, level, consequence, way_out, data)


def speed(folder: Path, count: int) -> tuple[float, float]:
    """Return the seconds to write and sync `count` bytes, and to read them again.

    The system is asked to drop the file from its cache before the read. A tmpfs is read from memory nevertheless.
    """
    chunk = os.urandom(min(count, CHUNK))
    with tempfile.TemporaryFile(buffering=0, dir=folder) as file:
        began = time.perf_counter()
        for start in range(0, count, CHUNK):
            file.write(chunk[: count - start])
        os.fsync(file.fileno())
        written = time.perf_counter()
        forget(file)
        file.seek(0)
        while file.read(CHUNK):
            pass
        return written - began, time.perf_counter() - written


def forget(file: IO[bytes]) -> None:
    """Ask the system to drop the file from its cache."""
    with contextlib.suppress(OSError):  # some file systems have no such advice
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
