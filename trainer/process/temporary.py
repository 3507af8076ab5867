"""The folder of a run's temporary files. If a kill leaves one, the next start removes it."""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, MARK = "echelon-", ".swept"  # the mark is in a folder whose lock tells whether its run lives


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in TMPDIR, locked while the run lives, and remove those of runs that have been killed.

    The lock holds in other containers and PID namespaces, too. systemd-tmpfiles leaves a locked folder alone.
    """
    root = Path(tempfile.gettempdir())
    root.mkdir(mode=0o700, parents=True, exist_ok=True)  # a cleaner may have removed it
    sweep(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: no start sweeps the folder
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(folder, MARK).touch()
        try:
            yield Path(folder)
        finally:
            os.close(descriptor)


def sweep(root: Path) -> None:
    """Remove this user's folders of runs that are no more."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # no folder, a link, another user's, or locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and (folder / MARK).exists():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def sockets_in(folder: Path) -> Iterator[None]:
    """Let multiprocessing put the sockets of this process's children there, and not into folders `pymp-*`."""
    config = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    config["tempdir"] = str(folder)
    try:
        yield
    finally:
        del config["tempdir"]
