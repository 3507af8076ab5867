"""Tar files by Python's tarfile, and the samples that webdataset finds in one."""

import io
import random
import tarfile
from pathlib import Path
from typing import Any

from webdataset.tariterators import group_by_keys, tar_file_expander

from support.shards import whole_walk
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader


def write_tar(path: Path, files: list[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def numbered(count: int, size: int = 700) -> list[tuple[str, bytes]]:
    rng = random.Random(count)
    return [
        (f"{i:06d}.{extension}", content)
        for i in range(count)
        for extension, content in (("bin", rng.randbytes(size)), ("cls", str(i).encode()))
    ]


def rows(index: Index, shard: int = 0) -> list[list[int]]:
    return [index.samples(shard)[i].tolist() for i in range(index.counts[shard])]


def copied(path: Path, name: str, content: bytes, folder: Path | None = None) -> Path:
    other = (folder or path.parent) / name
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(content)
    return other


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content) if content else None)


def shard_of(path: Path, **members: bytes) -> ShardReader:
    """One sample, `k`; an underscore in a name is a dot."""
    with tarfile.open(path, "w") as tar:
        for extension, content in members.items():
            add(tar, f"k.{extension.replace('_', '.')}", content)
    return ShardReader(Index.open([path]))


def read_all(reader: ShardReader) -> list[dict[str, Any]]:
    counts = reader.index.counts
    return [reader.read(ref) for ref in whole_walk(counts)]


def webdatasets(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as stream:
        samples = list(group_by_keys(tar_file_expander([{"url": "", "stream": stream}])))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]
