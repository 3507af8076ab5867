"""One process at a time writes a run: a lock that the system takes back when it ends. Standard library only."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from trainer.checkpoint.commit import make
from trainer.errors import ConfigError
from trainer.log import log

_held: dict[Path, int] = {}  # descriptors: to close any of a file's gives its lock back


def lock(run_dir: Path, key: str = "trainer.checkpoint.dir") -> None:
    """Claims the run's folder of checkpoints, or that of `key`, for this process, until `unlock` or until it ends,
    however it does.

    A POSIX lock, not flock's: a forked data worker that outlives a killed trainer doesn't keep it. On a file system
    without locks a warning takes its place.

    Raises:
        ConfigError: another process has it.
    """
    make(run_dir)
    path = run_dir.resolve() / ".lock"
    try:
        if path not in _held:
            _held[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        fcntl.lockf(_held[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(_held[path], 0)
        os.pwrite(_held[path], f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN) and path in _held:
            value = run_dir if key == "trainer.run_dir" else run_dir.parent
            raise ConfigError(
                f"{key}={value}: {os.pread(_held[path], 200, 0).decode()} writes the run {run_dir.name}; "
                f"wait for it to end, or use another {key}"
            ) from None
        log.warning("%s can't be locked (%s): see to it that no other process writes this run", path, error.strerror)


def unlock(run_dir: Path) -> None:
    descriptor = _held.pop(run_dir.resolve() / ".lock", None)
    if descriptor is not None:
        os.close(descriptor)
