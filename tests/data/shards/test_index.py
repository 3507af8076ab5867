"""The index of tar shards: against `tarfile` and webdataset, against every kind of damage, and its storage."""

import hashlib
import os
import tarfile
import zlib
from pathlib import Path

import pytest
from support.tars import copied, numbered, rows, write_tar

from trainer.data.shards.index import Index
from trainer.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("home")


def test_rows_are_where_tarfile_finds_the_members(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(7), tarfile.GNU_FORMAT)
    raw = path.read_bytes()
    with tarfile.open(path) as tar:
        starts = [member.offset for member in tar][::2]
        end = tar.offset
    expected = [[a, b - a, zlib.crc32(raw[a:b])] for a, b in zip(starts, [*starts[1:], end])]
    index = Index.open([path])
    assert index.counts == [7]
    assert rows(index) == expected
    shard = index.shards[0]
    assert (shard.bytes, shard.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())


def test_lists_that_cannot_work_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.tar").symlink_to(path)
    nothing = write_tar(tmp_path / "nothing.tar", [("README", b"")])
    for paths, text in (
        ([], "the list is empty"),
        ([path, tmp_path / "link.tar"], "given twice"),
        ([tmp_path / "b.tar"], r"b\.tar: No such file"),
        ([tmp_path / "folder"], r"folder/\*\.tar"),
        ([nothing], "no samples"),
    ):
        with pytest.raises(DataError, match=text):
            Index.open(paths)
    assert Index.open([nothing, path]).counts == [0, 2]


def test_a_shard_that_changed_since_is_refused(tmp_path: Path) -> None:
    """Also where it is damaged by now; not where it was only touched. Indexing it again is the way out."""
    paths = [write_tar(tmp_path / f"{name}.tar", numbered(5)) for name in "ab"]
    first, good, stored = Index.open(paths), paths[1].read_bytes(), paths[1].with_name("b.tar.idx").read_bytes()
    flipped = bytearray(good)
    flipped[600] ^= 1
    header = bytearray(good)
    header[0] ^= 1
    for content, text in (
        (bytes(flipped), "has another sha256"),
        (bytes(header), "has another sha256"),
        (good[:-512], f"has {len(good) - 512} bytes, and had {len(good)}"),
    ):
        paths[1].write_bytes(content)
        os.utime(paths[1], ns=(0, 1))
        with pytest.raises(ConfigError, match=rf"b\.tar: changed since it was indexed, it {text}; .* index .*b\.tar$"):
            Index.open(paths)
        assert paths[1].with_name("b.tar.idx").read_bytes() == stored

    paths[1].write_bytes(good)
    os.utime(paths[1], ns=(0, 1))
    calls = []
    assert Index.open(paths, lambda *call: calls.append(call)).fingerprint == first.fingerprint
    assert Index.open(paths, lambda *call: calls.append(call)).fingerprint == first.fingerprint
    assert calls == [("b.tar", 1, 1)]  # read again once

    paths[1].write_bytes(flipped)
    os.utime(paths[1], ns=(0, 2))
    assert Index.open(paths, rebuild=True).fingerprint != first.fingerprint
    assert Index.open(paths).fingerprint != first.fingerprint


def test_fingerprint_is_of_content_and_order(tmp_path: Path) -> None:
    a, b = write_tar(tmp_path / "a.tar", numbered(3)), write_tar(tmp_path / "b.tar", numbered(4))
    both = Index.open([a, b])
    assert both.counts == [3, 4]
    moved = [copied(path, path.name, path.read_bytes(), tmp_path / "moved") for path in (a, b)]
    assert Index.open(moved).fingerprint == both.fingerprint
    changed = bytearray(b.read_bytes())
    changed[600] ^= 1
    renamed = copied(b, "c.tar", b.read_bytes())
    others = [[b, a], [a], [a, renamed], [a, copied(b, "b.tar", bytes(changed), tmp_path / "changed")]]
    assert len({both.fingerprint, *(Index.open(paths).fingerprint for paths in others)}) == 5
