"""Creates a run's temporary folder, and removes those that killed runs left behind."""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONGEST = 107 - len("/listener-12345678")  # most bytes in the path of a folder for sockets
PREFIX, MARK = "echelon-", ".swept"  # only folders with the mark, which live runs keep locked, are swept


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in TMPDIR, locked while the run lives, and remove the folders of killed runs.

    The lock works across PID namespaces, and systemd-tmpfiles leaves a locked folder alone. Folders of another host
    name, as a container's, are not swept.
    """
    root = Path(tempfile.gettempdir())
    root.mkdir(mode=0o700, parents=True, exist_ok=True)  # a cleaner may have removed it
    sweep(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: no start sweeps the folder
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(folder, MARK).write_text(os.uname().nodename)
        try:
            yield Path(folder)
        finally:
            os.close(descriptor)


def sweep(root: Path) -> None:
    """Remove folders of this user's ended runs on this host. Locks of other hosts may be invisible here."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # no folder, a link, another user's, unmarked or locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                own = os.fstat(descriptor).st_uid == os.getuid()
                if own and (folder / MARK).read_bytes() == os.uname().nodename.encode():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def sockets_in(folder: Path) -> Iterator[None]:
    """Let multiprocessing put its sockets into `folder` instead of `pymp-*` folders.

    A socket's address has at most 107 bytes, so a longer path is addressed by its descriptor.
    """
    config = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    short = len(os.fsencode(folder)) <= LONGEST
    config["tempdir"] = str(folder) if short else f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        yield
    finally:
        del config["tempdir"]
        os.close(descriptor)
