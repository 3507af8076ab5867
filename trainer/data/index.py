"""Where each sample of a tar shard lies, its checksum, and which shards these are; built once, stored beside them."""

import contextlib
import hashlib
import itertools
import logging
import os
import secrets
import shlex
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trainer.data.remote import Remote, sha256_of
from trainer.data.tar import scan
from trainer.errors import ConfigError, DataError

VERSION = "2"  # of the stored file

log = logging.getLogger("echelon")


class Shard(NamedTuple):
    path: Path | Remote
    stored: Path  # its index
    bytes: int
    mtime_ns: int  # 0 for a remote one
    sha256: str
    samples: int


class Index:
    """The shards of one data set. The order given is the canonical order of their samples."""

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
        anew: bool = False,
    ) -> "Index":
        """Reads the stored index of each shard; makes it where there is none.

        Args:
            progress: Called with (shard, shards done, shards to do) after each that had to be indexed.
            workers: Threads that index: they read and hash side by side, members of a few kB by turns.
            anew: Shards that have changed are indexed again. A remote one counts as changed where it isn't kept here.

        Raises:
            DataError: for a shard that is missing, given twice, cut or damaged, and if there is no sample at all.
            ConfigError: for a shard that has changed since it was indexed, or is larger than the folder for it may be.
        """
        if not paths:
            raise DataError("no shards: the list is empty; give tar files, for example 'data/train-*.tar'")
        seen: set[str] = set()
        for path in paths:
            if (real := os.path.realpath(_file(path))) in seen:
                raise DataError(f"{path}: the shard is given twice; give each shard once")
            seen.add(real)
        shards = {path: _find_stored(path, anew) for path in paths}
        missing = [path for path, shard in shards.items() if shard is None]
        with ThreadPoolExecutor(workers) as pool:
            try:
                built = pool.map(_build, missing, itertools.repeat(anew))
                for done, (path, shard) in enumerate(zip(missing, built), 1):
                    shards[path] = shard
                    progress(path.name, done, len(missing))
            finally:
                pool.shutdown(cancel_futures=True)
        index = cls([shard for shard in shards.values() if shard])
        if not sum(index.counts):
            raise DataError(f"{paths[0]}: no samples in {len(paths)} shards; members must be named KEY.EXTENSION")
        return index

    def samples(self, shard: int) -> Any:
        """Rows [offset, length, crc32] of its samples, int64, mapped from the disk: `samples(shard)[i].tolist()`.

        A sample's bytes run from its first header to the end of its last member's last block.

        Raises:
            DataError: if it is gone, or another run has indexed the shard as something else since.
        """
        ours = self.shards[shard]
        loaded = _load(ours.path, ours.stored)
        if loaded is None or loaded[0].sha256 != ours.sha256:
            raise DataError(f"{ours.stored}: gone or changed during the run, maybe {ours.path} with it; start again")
        return loaded[1]


def opened(path: Path | Remote) -> BinaryIO:
    return path.open() if isinstance(path, Remote) else path.open("rb", buffering=0)


def _file(path: Path | Remote) -> Path:
    return path.file if isinstance(path, Remote) else path


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore the shard or leave it out") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a file; give tar files, for example '{path}/*.tar'")
    return status.st_size, status.st_mtime_ns


def _places(path: Path | Remote) -> tuple[Path, Path]:
    """Where an index may be stored, the better place first."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(_file(path)))).hexdigest()
    return Path(f"{_file(path)}.idx"), Path("~/.cache/echelon/index").expanduser() / f"{name}.idx"


def stored(path: Path | Remote) -> Shard | None:
    """What was indexed, whatever the shard is by now; None where nothing was."""
    return next((loaded[0] for place in _places(path) if (loaded := _load(path, place))), None)


def _find_stored(path: Path | Remote, anew: bool) -> Shard | None:
    """The shard by its stored index, where that is usable; a line in the log where it can't be read."""
    now = None if isinstance(path, Remote) else _size_and_time(path)
    if isinstance(path, Remote) and anew and not path.file.exists():
        return None
    unreadable = False
    for place in _places(path):
        loaded = _load(path, place)
        if loaded and now in (None, (loaded[0].bytes, loaded[0].mtime_ns)):
            return loaded[0]
        unreadable |= loaded is None and os.path.exists(place)
    if unreadable:
        log.warning("%s: its index can't be read; indexing it again", path)
    return None


def _load(path: Path | Remote, stored: Path) -> tuple[Shard, Any] | None:
    """The shard and its rows; None for a file that is gone, damaged, or of another version."""
    if not stored.is_file():  # of a pipe, reading would wait
        return None
    try:
        with safe_open(stored, framework="numpy") as file:
            about, rows = file.metadata(), file.get_slice("samples")
            size, mtime_ns, samples = (int(about[name]) for name in ("bytes", "mtime_ns", "samples"))
            known = about["version"] == VERSION and rows.get_dtype() == "I64" and rows.get_shape() == [samples, 3]
            if not known or about["crc32"] != checksum(about, rows[:]):  # of 10 million samples in 0.1 s
                return None
            if isinstance(path, Remote):
                path = path._replace(bytes=size, sha256=about["sha256"])
            return Shard(path, stored, size, mtime_ns, about["sha256"], samples), rows
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _build(path: Path | Remote, anew: bool) -> Shard:
    """Indexes a shard in one pass and stores the result."""
    mtime_ns = 0
    if not isinstance(path, Remote):
        size, mtime_ns = _size_and_time(path)  # before the pass: a change during it makes the index stale
        if not anew and (before := stored(path)):
            _refuse_changed(path, size, before)
    rows, sha256, size = scan_shard(path)
    path = path._replace(bytes=size, sha256=sha256) if isinstance(path, Remote) else path
    errors = []
    for place in _places(path):
        shard = Shard(path, place, size, mtime_ns, sha256, len(rows))
        try:
            _write(place, content_of(shard, rows))
            return shard
        except OSError as error:
            errors.append(f"{place.parent}: {error.strerror}")
    raise DataError(f"{path}: no place for its index ({'; '.join(errors)}); make one of these folders writable")


def content_of(shard: Shard, rows: NDArray[np.int64]) -> bytes:  # of its stored index
    about = {"version": VERSION} | {name: str(getattr(shard, name)) for name in Shard._fields[2:]}
    return save({"samples": rows}, about | {"crc32": checksum(about, rows)})


def checksum(about: Mapping[str, str], rows: NDArray[np.int64]) -> str:
    known = "".join(f"{name} {about[name]}\n" for name in sorted(about) if name != "crc32")
    return str(zlib.crc32(rows.tobytes(), zlib.crc32(known.encode())))


def _refuse_changed(path: Path, size: int, before: Shard) -> None:
    """Bytes that are the same under another time pass."""
    if size != before.bytes:
        how = f"has {size} bytes, and had {before.bytes}"
    else:
        with _readable(path) as file:
            if sha256_of(file) == before.sha256:
                return
        how = "has another sha256"
    raise ConfigError(
        f"{path}: changed since it was indexed, it {how}; restore it, or index it again: "
        f"python -m trainer.tools.shards {shlex.join(['index', str(path)])}"
    )


def scan_shard(path: Path | Remote) -> tuple[NDArray[np.int64], str, int]:
    """Rows [offset, length, crc32] of its samples, its sha256, its bytes.

    Raises:
        DataError: it can't be read, or is cut or damaged.
    """
    with _readable(path) as file:
        try:
            return *scan(file.fileno(), path), os.fstat(file.fileno()).st_size
        except DataError:
            if isinstance(path, Remote):
                path.drop()  # once mended there, it is downloaded again
            raise


@contextlib.contextmanager
def _readable(path: Path | Remote) -> Iterator[BinaryIO]:
    try:
        with opened(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore the shard or leave it out") from None


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; of two writers at the same time, either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
