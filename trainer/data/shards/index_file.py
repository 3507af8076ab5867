"""Stores and loads the index of a tar shard, and checks its integrity."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from zlib_ng import zlib_ng

from trainer.data.remote.eviction import is_regular
from trainer.data.remote.shard import Remote
from trainer.files import write_whole

VERSION = "2"  # of the format
WORDS = (b"__metadata__", b"mtime_ns", b"crc32")  # words of the header, one of which usually survives damage


class Shard(NamedTuple):
    path: Path | Remote
    index_path: Path
    bytes: int
    mtime_ns: int  # 0 for a remote shard
    sha256: str
    samples: int


def file_of(path: Path | Remote) -> Path:
    return path.file if isinstance(path, Remote) else path


def places_of(path: Path | Remote) -> Iterator[Path]:
    """Yield the paths where an index may be stored, the preferred one first."""
    yield Path(f"{file_of(path)}.idx")
    name = hashlib.sha256(os.fsencode(os.path.abspath(file_of(path)))).hexdigest()
    with contextlib.suppress(RuntimeError):  # there is no home folder
        yield Path("~/.cache/echelon/index").expanduser() / f"{name}.idx"


def indexed(path: Path | Remote) -> Shard | None:
    """Return the shard as it was indexed, even if it has changed since; None if there is no index."""
    return next((shard for place in places_of(path) if (shard := stored_at(path, place))), None)


def stored_at(path: Path | Remote, index_path: Path) -> Shard | None:
    with contextlib.suppress(OSError):
        if loaded := load(path, index_path):
            return loaded[0]
    return None


def load(path: Path | Remote, index_path: Path) -> tuple[Shard, NDArray[np.int64]] | None:
    """Load the shard, and its rows as a map of the file; None for an index that is damaged or has another version."""
    if not stat.S_ISREG(index_path.stat().st_mode):  # a pipe would block
        return None
    try:
        with safe_open(index_path, framework="numpy") as file:
            about, given = file.metadata(), file.get_slice("samples")
            size, mtime_ns, samples = (int(about[name]) for name in ("bytes", "mtime_ns", "samples"))
            known = about["version"] == VERSION and given.get_dtype() == "I64" and given.get_shape() == [samples, 3]
            if not known or file.keys() != ["samples"]:
                return None
        rows = mapped(index_path, samples)
        if about["crc32"] != checksum(about, rows):
            return None
        if isinstance(path, Remote):
            path = path._replace(bytes=size, sha256=about["sha256"])
        return Shard(path, index_path, size, mtime_ns, about["sha256"], samples), rows
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None


def mapped(index_path: Path, samples: int) -> NDArray[np.int64]:
    """Map the rows. Those of `safe_open` take ten times as long to look up one by one."""
    with index_path.open("rb") as file:  # torch keeps no file open, and takes names of UTF-8 only
        name, size = f"/dev/fd/{file.fileno()}", os.fstat(file.fileno()).st_size
        try:
            content = torch.from_file(name, shared=False, size=size, dtype=torch.uint8).numpy()
        except RuntimeError as error:
            raise OSError(errno.EIO, str(error), str(index_path)) from None
    header = 8 + int.from_bytes(content[:8].tobytes(), "little")
    return content[header:].view("<i8").reshape(samples, 3)


def content_of(shard: Shard, rows: NDArray[np.int64]) -> bytes:
    about = {"version": VERSION} | {name: str(getattr(shard, name)) for name in Shard._fields[2:]}
    return save({"samples": rows}, about | {"crc32": checksum(about, rows)})


def checksum(about: Mapping[str, str], rows: NDArray[np.int64]) -> str:
    known = "".join(f"{name} {about[name]}\n" for name in sorted(about) if name != "crc32")
    return str(zlib_ng.crc32(rows, zlib_ng.crc32(known.encode())))


def store(shard: Shard, rows: NDArray[np.int64]) -> None:
    """Store the index, replacing a damaged one but not a file that Echelon did not write."""
    if is_regular(shard.index_path):
        with shard.index_path.open("rb") as file:
            head = file.read(1024)
        if head.strip(b"\0") and not any(word in head for word in WORDS):  # a power cut may leave zeros
            raise OSError(errno.EEXIST, "is a file that Echelon did not write", str(shard.index_path))
    write_whole(shard.index_path, content_of(shard, rows))
