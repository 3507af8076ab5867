"""Locks a run so that only one process writes it; the system releases the lock when the process ends."""

import errno
import fcntl
import os
import re
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from trainer.checkpoint.commit import begin, make
from trainer.checkpoint.fence import ATTEMPT
from trainer.checkpoint.locate import CHECKPOINTED, note
from trainer.errors import ConfigError
from trainer.files import sweep_temporary, write_whole
from trainer.log import log

HELD = re.compile(rb"process [0-9]+ on .*")  # content of a lock
UNWRITTEN = re.compile(r"logs|tensorboard|export|profile|(rank\d+\.log|[a-z_]+\.jsonl)")  # folders, or empty files
EXPORTED = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # a file that safetensors was writing

_held: dict[Path, int] = {}  # descriptors; POSIX releases the lock when any descriptor of the file is closed


class Claim:
    """The right to write a run: its checkpoint folder and, if given, the run's own folder.

    Raises:
        ConfigError: Another process writes this run.
    """

    def __init__(self, folder: Path, run_dir: Path | None = None) -> None:
        self.folder, self.run_dir = folder, run_dir
        with ExitStack() as refused:
            refused.callback(self.close)
            lock(folder)
            if run_dir is not None:
                lock(run_dir, "trainer.run_dir")
                sweep_temporary(run_dir, older_s=0.0)  # no other process is writing there
                sweep_temporary(run_dir / "export", older_s=0.0, names=EXPORTED)
            self.attempt = begin(folder)
            refused.pop_all()

    def mark(self) -> None:
        """Write the paths of the checkpoints into the run's own folder."""
        if self.run_dir is not None:
            text, file = note(self.run_dir, self.folder), self.run_dir / CHECKPOINTED
            if not file.exists() or file.read_text() != text:
                write_whole(file, text.encode())

    def close(self) -> None:
        """Release the run, and delete its folders if this process has written nothing into them."""
        for folder in filter(None, (self.folder, self.run_dir)):
            if (folder.resolve() / ".lock") in _held:
                _remove_empty(folder)
            unlock(folder)


def lock(run_dir: Path, key: str = "trainer.checkpoint.dir") -> None:
    """Claim the folder that `key` names, until `unlock` or until this process ends; raise ConfigError if it is taken.

    This is a POSIX lock, not a flock, so that a forked data worker that outlives a killed trainer doesn't keep it. On a
    file system without locks, only a warning is logged.
    """
    make(run_dir)
    path, value = run_dir.resolve() / ".lock", run_dir if key == "trainer.run_dir" else run_dir.parent
    if path not in _held and is_foreign(path):
        raise ConfigError(f"{key}={value}: {path} is a file that Echelon did not write; give another {key}")
    try:
        if path not in _held:
            _held[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        fcntl.lockf(_held[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(_held[path], 0)
        os.pwrite(_held[path], f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN) and path in _held:
            raise ConfigError(
                f"{key}={value}: {os.pread(_held[path], 200, 0).decode()} writes the run {run_dir.name}; "
                f"wait for it to end, or use another {key}"
            ) from None
        log.warning("%s: can't be locked (%s); make sure that no other process writes this run", path, error.strerror)


def is_foreign(path: Path) -> bool:
    """Return whether the lock's name is taken by a file that is not a lock; zero bytes are one after a power loss."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return bool(file.read(300).strip(b"\0")) and not is_lock(path)


def is_lock(path: Path) -> bool:
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return stat.S_ISREG(os.fstat(file).st_mode) and HELD.match(os.read(file, 300)) is not None
        finally:
            os.close(file)
    return False


def is_running(run_dir: Path) -> bool:
    """Return whether a process writes the run; True on a file system without locks, which can't say."""
    path = run_dir.resolve() / ".lock"
    if path in _held:  # this process's own, which would be lost with any descriptor
        return True
    try:
        with path.open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        found = sorted(folder.rglob("*"), reverse=True)  # files before their folder
        if not folder.is_symlink() and all(map(_unwritten, found)):
            for path in found:
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()


def _unwritten(path: Path) -> bool:
    if path.name in (".lock", ATTEMPT):
        return True
    about, name = path.lstat(), UNWRITTEN.fullmatch(path.name)
    made = stat.S_ISREG(about.st_mode) and not about.st_size if name and name[1] else stat.S_ISDIR(about.st_mode)
    return name is not None and made


def unlock(run_dir: Path) -> None:
    descriptor = _held.pop(run_dir.resolve() / ".lock", None)
    if descriptor is not None:
        os.close(descriptor)
