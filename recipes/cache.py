"""The folder for what recipes prepare once: its place, names, locks, and how it is built."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.data.remote.eviction import is_regular, open_regular
from trainer.errors import ConfigError, refuse_empty, refuse_remote
from trainer.files import sync
from trainer.log import log


def root(cache: str | None = None) -> Path:
    """Return the folder `cache`; None: the user's cache folder."""
    refuse_empty("recipe.cache", cache)
    refuse_remote("recipe.cache", cache)
    return Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "echelon")).expanduser()


def digest(identity: object) -> str:
    """Return a name for what is made of `identity`, which JSON can hold."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def build_once(
    place: Path, task: str, is_whole: Callable[[Path], bool], build: Callable[[Path], None], setting: str = ""
) -> None:
    """Have `place` built, unless it is whole. One of several processes builds it; the others wait.

    Args:
        task: The subject of the log's lines.
        build: Writes a file or a flat folder to a path, which gets its name once it is on the disk.
        setting: What names the folder, with its value; empty: `recipe.cache`.

    Raises:
        ConfigError: The cache can't be written.
    """
    try:
        if not is_whole(place):
            with lock(place.with_suffix(".lock"), task):
                if not is_whole(place):
                    _build(place, task, build)
    except OSError as error:
        setting = setting or f"recipe.cache={place.parent}"
        raise ConfigError(f"{setting}: {error}; give a writable folder with free space") from None


def _build(place: Path, task: str, build: Callable[[Path], None]) -> None:
    partial = place.with_suffix(".partial")
    _remove(partial)  # of a build that was killed: this process has the lock
    build(partial)
    for path in (*partial.glob("*"), partial):
        sync(path)
    if os.path.lexists(place):
        log.warning("%s: %s: is damaged, and is replaced", task, place)
        _remove(place)
    partial.rename(place)
    sync(place.parent)


def _remove(made: Path) -> None:
    """Remove what `build` has written: a file, or a folder of files.

    Raises:
        OSError: It is or has something else, such as a link.
    """
    if made.is_dir() and not made.is_symlink():
        files = list(made.iterdir())
        if odd := next((path for path in files if not is_regular(path)), None):
            raise OSError(errno.EEXIST, "is not Echelon's; move it", str(odd))
        for path in files:
            path.unlink()
        made.rmdir()
    elif is_regular(made):
        made.unlink()
    elif os.path.lexists(made):
        raise OSError(errno.EEXIST, "is not Echelon's; move it", str(made))


@contextmanager
def lock(path: Path, task: str) -> Iterator[None]:
    """Hold the lock file `path`, which stays.

    Args:
        task: The subject of the log's line, if another process has the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", opener=open_regular) as file:  # in a shared cache, a pipe of a neighbour's would not open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process is preparing %s; waiting for it", task, path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
