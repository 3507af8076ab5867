"""A stored index is used as long as its shard is the same, and none is believed that is damaged."""

import os
from pathlib import Path

import pytest
from support.tars import numbered, rows, write_tar

from trainer.data.shards.index import Index
from trainer.errors import DataError

pytestmark = pytest.mark.usefixtures("home")


def test_stored_index_is_used_until_the_shard_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    calls = []
    first = Index.open([path], lambda *call: calls.append(call))
    assert calls == [("a.tar", 1, 1)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "a.tar.idx"]

    # The same size and time, so nobody looks at the content: what is read must be the stored index.
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = Index.open([path], lambda *call: calls.append(call))
    assert (second.fingerprint, rows(second), len(calls)) == (first.fingerprint, rows(first), 1)
    assert not caplog.records

    write_tar(path, numbered(6))
    third = Index.open([path], lambda *call: calls.append(call), rebuild=True)
    assert (third.counts, len(calls)) == ([6], 2)
    assert third.fingerprint != first.fingerprint
    with pytest.raises(DataError, match=r"a\.tar\.idx: changed during the run"):
        first.samples(0)


def test_a_killed_process_leaves_nothing_beside_shards(tmp_path: Path) -> None:
    """The next start deletes a temporary file of an index, once nobody can be writing it. The user's files stay."""
    shard = write_tar(tmp_path / "a.tar", numbered(3))
    names = [
        *(f".echelon-{name}.tmp" for name in ("0123456789abcdef", "fedcba9876543210", "0123456789abcdee")),
        ".mine.tmp",
    ]
    left, young, folder, *mine = (tmp_path / name for name in [*names, ".0123456789abcdef.tmp", ".tmpa1B2c3"])
    folder.mkdir()
    for path in (left, young, *mine):
        path.write_bytes(b"half")
    for path in (left, folder, *mine):
        os.utime(path, (0, 0))
    Index.open([shard])
    assert [path for path in (left, young, folder, *mine) if path.exists()] == [young, folder, *mine]


def test_an_index_that_is_damaged_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    stored = Path(f"{path}.idx")
    index = Index.open([path])
    fingerprint, expected = index.fingerprint, rows(index)
    good = stored.read_bytes()
    for bad in (b"", good[:100], good[:-1], bytes(len(good)), good.replace(b'"sha256"', b'"sha255"')):
        stored.write_bytes(bad)
        caplog.clear()
        index = Index.open([path])
        assert (index.fingerprint, rows(index)) == (fingerprint, expected)
        assert "can't be read" in caplog.text


@pytest.mark.slow
def test_no_flipped_bit_of_an_index_is_believed(tmp_path: Path) -> None:
    """In a row it would leave out a good sample, or train on another's bytes; in a number, refuse a good shard."""
    path = write_tar(tmp_path / "a.tar", numbered(5))
    index = Index.open([path])
    expected, good = (index.shards, rows(index)), index.shards[0].index_path.read_bytes()
    for byte in range(8, len(good)):
        flipped = bytearray(good)
        flipped[byte] ^= 1
        index.shards[0].index_path.write_bytes(flipped)
        again = Index.open([path])
        assert (again.shards, rows(again)) == expected, byte


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_where_the_folder_takes_no_index_the_cache_does(tmp_path: Path, home: Path, kind: str) -> None:
    """A folder, or another program's file, is never replaced."""
    path = write_tar(tmp_path / "a.tar", numbered(5))
    other = tmp_path / "a.tar.idx"
    other.mkdir() if kind == "folder" else other.write_bytes(b"precious" * 500)
    first = Index.open([path])
    assert other.is_dir() or other.read_bytes() == b"precious" * 500
    assert first.shards[0].index_path.parent == home / ".cache/echelon/index"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "a.tar.idx", "home"]
    calls = []
    assert Index.open([path], lambda *call: calls.append(call)).fingerprint == first.fingerprint
    assert not calls
    assert len(rows(first)) == 5


def test_without_any_place_for_the_index_both_are_named(tmp_path: Path, home: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    (tmp_path / "a.tar.idx").mkdir()
    home.write_text("a file")
    with pytest.raises(DataError, match=r"its index can't be stored .*\.cache/echelon/index"):
        Index.open([path])
