"""Where each sample of a tar shard lies, its checksum, and which shards these are; built once, stored beside them."""

import glob
import hashlib
import logging
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from braceexpand import braceexpand
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trainer.data.tar import damaged, members, read_at
from trainer.errors import DataError

VERSION = "1"  # of the stored file
LONGEST_END = 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE  # two zero blocks, and zeros up to a full record

log = logging.getLogger("echelon")


class Shard(NamedTuple):
    path: Path
    stored: Path  # its index
    bytes: int
    mtime_ns: int
    sha256: str
    samples: int


class Index:
    """The shards of one data set. The order given is the canonical order of their samples."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.counts = [shard.samples for shard in shards]
        rows = [f"{s.path.name} {s.bytes} {s.samples} {s.sha256}\n" for s in shards]
        self.fingerprint = hashlib.sha256(os.fsencode("".join(rows))).hexdigest()

    @classmethod
    def open(
        cls, paths: Sequence[Path], progress: Callable[[str, int, int], None] = lambda *_: None, workers: int = 4
    ) -> "Index":
        """Reads the stored index of each shard; makes it where there is none or the shard has changed since.

        Args:
            progress: Called with (shard, bytes done, bytes to do) after each shard that had to be indexed.
            workers: Threads that index: they read and hash side by side, members of a few kB by turns.

        Raises:
            DataError: for a shard that is missing, given twice, cut or damaged, and if there is no sample at all.
        """
        if not paths:
            raise DataError("no shards: the list is empty; give tar files, for example 'data/train-*.tar'")
        seen: set[str] = set()
        for path in paths:
            if (real := os.path.realpath(path)) in seen:
                raise DataError(f"{path}: the shard is given twice; give each shard once")
            seen.add(real)
        shards = {path: _find_stored(path) for path in paths}
        missing = [path for path, shard in shards.items() if shard is None]
        done, total = 0, sum(_stat(path).st_size for path in missing)
        with ThreadPoolExecutor(workers) as pool:
            try:
                for built in pool.map(_build, missing):
                    shards[built.path] = built
                    done += built.bytes
                    progress(built.path.name, done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        index = cls([shard for shard in shards.values() if shard])
        if not sum(index.counts):
            raise DataError(f"{paths[0]}: no samples in {len(paths)} shards; members must be named KEY.EXTENSION")
        return index

    def samples(self, shard: int) -> Any:
        """Rows [offset, length, crc32] of its samples, int64, mapped from the disk: `samples(shard)[i].tolist()`.

        A sample's bytes run from its first header to the end of its last member's last block.

        Raises:
            DataError: if another run has indexed the shard as something else since.
        """
        ours = self.shards[shard]
        loaded = _load(ours.path, ours.stored)
        if loaded is None or loaded[0].sha256 != ours.sha256:
            raise DataError(f"{ours.stored}: gone or changed during the run, maybe {ours.path} with it; start again")
        return loaded[1]


def find_shards(data: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that a recipe names: paths, glob patterns, and braces such as `train-{000..009}.tar`; sorted.

    Raises:
        DataError: naming the pattern that matches no file.
    """
    found: list[str] = []
    for pattern in [data] if isinstance(data, str | Path) else data:
        try:
            names = [str(pattern)] if os.path.isfile(pattern) else list(braceexpand(str(pattern)))
        except ValueError as error:
            raise DataError(f"{pattern}: not a pattern ({error}); write braces as {{000..009}} or {{a,b}}") from None
        for name in names:
            files = [name] if os.path.isfile(name) else glob.glob(name, recursive=True)
            files = [file for file in files if os.path.isfile(file) and not file.endswith(".idx")]
            if not files:
                of = "" if name == str(pattern) else f" (of {pattern})"
                raise DataError(f"{name}{of}: no such file; give tar files, for example 'data/train-*.tar'")
            found += files
    return sorted(map(Path, found))


def _stat(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore the shard or leave it out") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a file; give tar files, for example '{path}/*.tar'")
    return status


def _places(path: Path) -> tuple[Path, Path]:
    """Where an index may be stored, the better place first."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()
    return Path(f"{path}.idx"), Path("~/.cache/echelon/index").expanduser() / f"{name}.idx"


def stored(path: Path) -> Shard | None:
    """What was indexed, whatever the shard is by now; None where nothing was."""
    found = (_load(path, place) for place in _places(path))
    return next((loaded[0] for loaded in found if loaded), None)


def _find_stored(path: Path) -> Shard | None:
    """The shard by its stored index, where that is usable; a line in the log where there is one that isn't."""
    now = _stat(path)
    reasons = []
    for stored in _places(path):
        loaded = _load(path, stored)
        if loaded and (loaded[0].bytes, loaded[0].mtime_ns) == (now.st_size, now.st_mtime_ns):
            return loaded[0]
        if os.path.exists(stored):
            reasons.append("changed since it was indexed" if loaded else "its index can't be read")
    if reasons:
        log.warning("%s: %s; indexing it again", path, reasons[0])
    return None


def _load(path: Path, stored: Path) -> tuple[Shard, Any] | None:
    """The shard and its rows; None for a file that is gone, damaged, or of another version."""
    if not stored.is_file():  # of a pipe, reading would wait
        return None
    try:
        with safe_open(stored, framework="numpy") as file:
            about, rows = file.metadata(), file.get_slice("samples")
            size, mtime_ns, samples = (int(about[name]) for name in ("bytes", "mtime_ns", "samples"))
            if about["version"] != VERSION or rows.get_dtype() != "I64" or rows.get_shape() != [samples, 3]:
                return None
            return Shard(path, stored, size, mtime_ns, about["sha256"], samples), rows
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _build(path: Path) -> Shard:
    """Indexes a shard in one pass and stores the result."""
    now = _stat(path)  # before the pass: a change during it makes the index stale
    samples, sha256 = scan(path)
    count = len(samples)
    about = {"version": VERSION, "bytes": now.st_size, "mtime_ns": now.st_mtime_ns, "sha256": sha256, "samples": count}
    content = save({"samples": samples}, {key: str(value) for key, value in about.items()})
    errors = []
    for stored in _places(path):
        try:
            _write(stored, content)
            return Shard(path, stored, now.st_size, now.st_mtime_ns, sha256, count)
        except OSError as error:
            errors.append(f"{stored.parent}: {error.strerror}")
    raise DataError(f"{path}: no place for its index ({'; '.join(errors)}); make one of these folders writable")


def scan(path: Path) -> tuple[NDArray[np.int64], str]:
    """Rows [offset, length, crc32] of a shard's samples, and its sha256. One pass.

    Raises:
        DataError: it can't be read, or is cut or damaged.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _scan(path, file.fileno())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore the shard or leave it out") from None


def _scan(path: Path, fd: int) -> tuple[NDArray[np.int64], str]:
    """Groups neighbours of one key, as WebDataset does; checks that nothing is missing at the end."""
    size = os.fstat(fd).st_size

    def fetch(offset: int, count: int) -> bytes:
        start, stop = min(offset, size), min(offset + count, size)  # a header may ask for more than there is
        return read_at(fd, start, stop - start)

    sha256 = hashlib.sha256()
    rows: list[list[int]] = []
    key, extensions, crc32, end = None, set(), 0, 0
    for member in members(fetch, path):
        content = fetch(member.start, member.end - member.start)
        sha256.update(content)
        end = member.end
        if member.key not in (None, key):
            key, extensions, crc32 = member.key, {"__key__"}, 0
            rows.append([member.start, 0, 0])
        crc32 = zlib.crc32(content, crc32)
        if member.key is None:
            continue
        if member.extension in extensions:
            raise DataError(f"{path}: two members {member.extension!r} of {key!r}, at byte {member.start}; rename one")
        extensions.add(member.extension)
        rows[-1][1:] = end - rows[-1][0], crc32
    last = fetch(end, LONGEST_END + 1)
    if any(last) or not 2 * tarfile.BLOCKSIZE <= len(last) <= LONGEST_END:
        raise damaged(path, end, "no end of archive")
    sha256.update(last)
    return np.array(rows, np.int64).reshape(-1, 3), sha256.hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; of two writers at the same time, either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
