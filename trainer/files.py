"""Writes the files of a run: growing files survive a full disk; all others appear whole or not at all."""

import errno
import glob
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer import timeouts
from trainer.errors import ConfigError, refuse_remote
from trainer.log import log

MOST = 1 << 20  # bytes of a file that are kept in memory
CHUNK = 4 << 20  # bytes that are hashed at once

OF_SYSTEMS = {"__MACOSX", "Thumbs.db", "desktop.ini"}  # what macOS and Windows put into folders of data
TEMPORARY = re.compile(r"\.echelon-[0-9a-f]{16}\.tmp")


class Appended:
    """An append-only file. Lines that can't be written are kept in memory, and written once there is room again.

    Beyond `MOST` bytes the newest lines are lost. The log reports each problem once. The file is neither opened nor
    truncated before the first write. If someone removes the file, the next line begins a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.kept = path, b""
        self.file: int | None = None
        self.saved: dict[str, Any] | None = None  # a checkpoint's state, to which the file is truncated
        self.trouble = 0  # reported so far: 1, the file can't be written; 2, lines were lost

    def write(self, content: bytes) -> int:
        """Append now, or once there is room."""
        restored = self._restore()
        if self.kept and restored:
            self.flush()  # there may be room again
        lost = bool(self.kept) and len(self.kept) + len(content) > MOST
        self.kept += b"" if lost else content
        if restored:
            self.flush()
        if lost:
            self._report(2, f"more than {MOST >> 10} KiB could not be written; new lines are lost")
        return len(content)

    def flush(self, durably: bool = False) -> None:
        """Write the kept lines."""
        if not self._restore():
            return
        try:
            removed = self.file is not None and not os.fstat(self.file).st_nlink
            if self.file is None or removed:
                self._release()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            while self.kept:
                self.kept = self.kept[os.write(self.file, self.kept) :]
            if durably:
                os.fsync(self.file)
        except OSError as error:
            self._refused(error)
            return
        if self.trouble:
            self.trouble = 0
            log.info("%s: can be written again", self.path)
        if removed:
            log.warning("%s: was removed during the run; its earlier lines are lost", self.path)

    def close(self) -> None:
        """Write the kept lines, and close the file."""
        if self.kept:
            self.flush()
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes on the disk, and the lines that are still unwritten."""
        if not self._restore():
            assert self.saved
            return {"bytes": self.saved["bytes"], "kept": self.saved["kept"] + self.kept.decode()}
        if self.file is not None:
            self.flush(durably=True)
        return {"bytes": self.path.stat().st_size if self.path.exists() else 0, "kept": self.kept.decode()}

    def go_on(self, state: dict[str, Any]) -> None:
        """Schedule a truncation, before the first write, of the lines that were written after `state` was taken.

        Raises:
            ConfigError: `state` is not the state of such a file.
        """
        size, kept = (state.get("bytes"), state.get("kept")) if isinstance(state, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(kept, str):
            raise ConfigError(f"trainer.resume: the checkpoint has no valid length of {self.path}; resume from another")
        self.saved = state

    def _release(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _restore(self) -> bool:
        """Truncate the file to the checkpoint's state, once. Return false while the disk refuses it."""
        if self.saved is None:
            return True
        state = self.saved
        try:
            found = self.path.stat().st_size if self.path.exists() else 0
            if found > state["bytes"]:
                os.truncate(self.path, state["bytes"])
            zeroed = ends_in_zero(self.path)
        except OSError as error:
            self._refused(error)
            return False
        self.saved, self.kept = None, state["kept"].encode() + self.kept
        if found < state["bytes"]:
            text = "%s: lines are missing: the file has %d bytes, and the checkpoint counted %d"
            log.warning(text, self.path, found, state["bytes"])
        if zeroed:
            self.kept = b"\n" + self.kept
            log.warning("%s: lines are missing: it ends in zero bytes, as after a power loss", self.path)
        return True

    def _refused(self, error: OSError) -> None:
        self._report(1, f"{error.strerror}; training continues, and new lines are kept until there is room")

    def _report(self, trouble: int, text: str) -> None:
        if trouble > self.trouble:
            self.trouble = trouble  # before the warning, since the log may be such a file, too
            log.warning("%s: %s", self.path, text)


def ends_in_zero(file: Path) -> bool:
    """Return whether the last byte is 0, which no line of text has; false for an empty or missing file."""
    with suppress(OSError), file.open("rb") as content:
        content.seek(-1, os.SEEK_END)
        return content.read(1) == b"\0"
    return False


_made: list[Path] = []


def make_folder(folder: Path, exist_ok: bool = True) -> None:
    """Make a folder and its parents. `remove_unused` deletes the ones that are still empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=exist_ok)
    _made.extend(path.absolute() for path in reversed(new))


def remove_unused() -> None:
    """Delete the folders that `make_folder` has made in this process, if they are still empty."""
    while _made:
        with suppress(OSError):
            _made.pop().rmdir()


@contextmanager
def no_folders_if_refused() -> Iterator[None]:
    """Call `remove_unused` if the block raises an error."""
    try:
        yield
    except BaseException:
        remove_unused()
        raise


def refuse_folder(key: str, file: Path | None) -> None:
    """Refuse a path that `write_whole` can't replace, before any work is lost or a device is deleted.

    Raises:
        ConfigError: `key` names a folder, a URL, a link, or a device or pipe such as /dev/stdout.
    """
    refuse_remote(key, file)
    if file and os.path.isdir(file):
        raise ConfigError(f"{key}={file}: is a folder; name a file")
    if file and os.path.lexists(file) and not stat.S_ISREG(os.lstat(file).st_mode):
        raise ConfigError(f"{key}={file}: is a link, a device or a pipe, which would be replaced; name a file")


def special(folder: Path, pattern: str = "*") -> Path | None:
    """Return a pipe, socket or device in the folder, since reading one may block forever; None if there is none."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
                return path
    return None


def matching(pattern: str) -> list[str]:
    """Return the paths that a pattern matches; `**` matches any folders. A folder may be named `[2024]`."""
    folders = (slash.end() for slash in re.finditer("/", pattern) if os.path.isdir(pattern[: slash.end()]))
    folder = pattern[: max(folders, default=0)]
    literal = glob.escape(folder) + pattern[len(folder) :]
    return glob.glob(pattern, recursive=True) or glob.glob(literal, recursive=True)


def is_hidden(name: str) -> bool:
    """Return whether a path inside a data folder is hidden, or was put there by an operating system."""
    return any(part.startswith(".") or part in OF_SYSTEMS for part in name.split("/"))


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically, and make its folder if it is missing. The bytes are on disk when this returns.

    If two processes write at once, one of the files stays. An error leaves the older file in place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_in(path.parent)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_in(folder: Path) -> Path:
    """Return a new name that `sweep_temporary` recognises."""
    return folder / f".echelon-{os.urandom(8).hex()}.tmp"


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # FUSE, 9p and others can't sync a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def sha256_of(file: BinaryIO) -> str:
    """Return the sha256 of an open file, from its beginning."""
    import hashlib

    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def sweep_temporary(folder: Path, older_s: float = timeouts.ABANDONED_S, names: re.Pattern[str] = TEMPORARY) -> None:
    """Delete the temporary files, such as those of `write_whole`, that killed processes have left in a folder."""
    for path in folder.glob(".*"):
        with suppress(OSError):
            file = path.lstat()
            left = names.fullmatch(path.name) and stat.S_ISREG(file.st_mode)
            if left and time.time() - file.st_mtime >= older_s:
                path.unlink()


@contextmanager
def usual_permissions(folder: Path) -> Iterator[None]:
    """Give files that the block writes into the folder the default permissions.

    Some libraries write files that only the owner can read. Existing files keep their permissions.
    """

    def regular() -> dict[Path, tuple[int, int]]:
        found = {path: path.lstat() for path in folder.rglob("*")}
        return {path: (s.st_ino, s.st_mtime_ns) for path, s in found.items() if stat.S_ISREG(s.st_mode)}

    before = regular()
    yield
    os.umask(mask := os.umask(0))
    for path in dict(regular().items() - before.items()):
        path.chmod(path.stat().st_mode | 0o666 & ~mask)


def write_json(path: Path, value: Any) -> None:
    """Replace a file with JSON. NaN and infinity become null."""
    write_whole(path, f"{json.dumps(finite(value), indent=1, allow_nan=False)}\n".encode())


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, with None, also inside lists and dicts."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
