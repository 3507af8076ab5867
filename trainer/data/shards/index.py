"""Indexes tar shards: the position and checksum of each sample, built once and stored next to the shards."""

import contextlib
import hashlib
import itertools
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainer.data.remote.shard import Remote
from trainer.data.shards.index_file import Shard, file_of, indexed, load, places_of, store, stored_at
from trainer.data.shards.tar import scan
from trainer.errors import ConfigError, DataError
from trainer.files import sha256_of, sweep_temporary
from trainer.log import log


class Index:
    """The shards of one data set, whose given order defines the order of the samples."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.counts = [shard.samples for shard in shards]
        for shard in shards:
            if isinstance(shard.path, Remote):
                shard.path.refuse_larger(shard.bytes)
        rows = [f"{s.path.name} {s.bytes} {s.samples} {s.sha256}\n" for s in shards]
        self.fingerprint = hashlib.sha256(os.fsencode("".join(rows))).hexdigest()

    @classmethod
    def open(
        cls,
        paths: Sequence[Path | Remote],
        progress: Callable[[str, int, int], None] = lambda *_: None,
        workers: int = 4,
        rebuild: bool = False,
    ) -> "Index":
        """Read the stored index of each shard, or build it if there is none.

        Args:
            progress: Called with (shard, shards done, shards to do) after each shard that had to be indexed.
            workers: Number of indexing threads.
            rebuild: Index again all local shards that have changed, and all shards from URLs and programs.

        Raises:
            DataError: A shard is missing, given twice, truncated or damaged, or there are no samples at all.
            ConfigError: A shard has changed since it was indexed, or is larger than the limit of its folder.
        """
        if not paths:
            raise DataError("no shards: the list is empty; give tar files, for example 'data/train-*.tar'")
        seen: set[str] = set()
        for path in paths:
            if (real := os.path.realpath(file_of(path))) in seen:
                raise DataError(f"{path}: the shard is given twice; give each shard once")
            seen.add(real)
        shards = {path: _find_stored(path, rebuild) for path in paths}
        missing = [path for path, shard in shards.items() if shard is None]
        with ThreadPoolExecutor(workers) as pool:
            try:
                built = pool.map(_build, missing, itertools.repeat(rebuild))
                for done, (path, shard) in enumerate(zip(missing, built), 1):
                    shards[path] = shard
                    progress(path.name, done, len(missing))
            finally:
                pool.shutdown(cancel_futures=True)
        index = cls([shard for shard in shards.values() if shard])
        for folder in {shard.index_path.parent for shard in index.shards}:
            sweep_temporary(folder)
        if not sum(index.counts):
            raise DataError(f"{paths[0]}: no samples in {len(paths)} shards; members must be named KEY.EXTENSION")
        return index

    def samples(self, shard: int) -> Any:
        """Return rows [offset, length, crc32] of a shard's samples, int64, mapped: `samples(shard)[i].tolist()`.

        A sample's bytes run from its first header to the end of its last member's last block.

        Raises:
            OSError: The index can't be read.
            DataError: Another run has indexed the shard again, with different content.
        """
        ours = self.shards[shard]
        loaded = load(ours.path, ours.index_path)
        if loaded is None or loaded[0].sha256 != ours.sha256:
            raise DataError(f"{ours.index_path}: changed during the run, and maybe {ours.path}, too; start again")
        return loaded[1]


def opened(path: Path | Remote) -> BinaryIO:
    return path.open() if isinstance(path, Remote) else path.open("rb", buffering=0)


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore the shard or leave it out") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a file; give tar files, for example '{path}/*.tar'")
    return status.st_size, status.st_mtime_ns


def _find_stored(path: Path | Remote, rebuild: bool) -> Shard | None:
    """Return the shard as in its stored index, None if it has no usable one."""
    now = None if isinstance(path, Remote) else _size_and_time(path)
    if isinstance(path, Remote) and rebuild and (path.may_change or not path.file.exists()):
        return None
    unreadable = False
    for place in places_of(path):
        shard = stored_at(path, place)
        if shard and now in (None, (shard.bytes, shard.mtime_ns)):
            return shard
        unreadable |= shard is None and os.path.exists(place)
    if unreadable:
        log.warning("%s: its index can't be read; indexing it again", path)
    return None


def _build(path: Path | Remote, rebuild: bool) -> Shard:
    mtime_ns = 0
    if isinstance(path, Remote):
        if rebuild:
            path.drop()  # the source may have changed since the download
    else:
        size, mtime_ns = _size_and_time(path)  # before the pass: a change during it makes the index stale
        if not rebuild and (before := indexed(path)):
            _refuse_changed(path, size, before)
    try:
        rows, sha256, size = scan_shard(path)
    except NotWhole as error:
        if not (isinstance(path, Remote) and path.of_server):
            raise
        log.info("%s; downloading it once more", error)
        rows, sha256, size = scan_shard(path)
    path = path._replace(bytes=size, sha256=sha256) if isinstance(path, Remote) else path
    errors = []
    for place in places_of(path):
        shard = Shard(path, place, size, mtime_ns, sha256, len(rows))
        try:
            store(shard, rows)
            return shard
        except OSError as error:
            errors.append(f"{place.parent}: {error.strerror}")
    raise DataError(f"{path}: its index can't be stored ({'; '.join(errors)}); make one of these folders writable")


def _refuse_changed(path: Path, size: int, before: Shard) -> None:
    """Refuse a shard whose content differs from its index, whatever its time."""
    if size != before.bytes:
        change = f"has {size} bytes, and had {before.bytes}"
    else:
        with _readable(path) as file:
            if sha256_of(file) == before.sha256:
                return
        change = "has another sha256"
    raise ConfigError(
        f"{path}: changed since it was indexed, it {change}; restore it, or index it again: "
        f"echelon shards {shlex.join(['index', str(path)])}"
    )


class NotWhole(DataError):
    """A shard is truncated or damaged."""


def scan_shard(path: Path | Remote) -> tuple[NDArray[np.int64], str, int]:
    """Return rows [offset, length, crc32] of a shard's samples, its sha256, and its size in bytes."""
    with _readable(path) as file:
        try:
            return *scan(file.fileno(), path), os.fstat(file.fileno()).st_size
        except DataError as error:
            if isinstance(path, Remote):
                path.drop()  # the next call downloads it again
            raise NotWhole(str(error)) from None


@contextlib.contextmanager
def _readable(path: Path | Remote) -> Iterator[BinaryIO]:
    try:
        with opened(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore the shard or leave it out") from None
