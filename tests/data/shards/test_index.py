"""The index of tar shards: against `tarfile` and webdataset, against every kind of damage, and its storage."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import random
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from webdataset.tariterators import base_plus_ext

from trainer.config.options import DataOptions
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.tar import split_name
from trainer.errors import ConfigError, DataError

TAR = shutil.which("tar")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


LONGEST_END = 1024 + 10240  # the end marker, filled up to a record of 20 blocks


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


def test_split_name_is_webdatasets() -> None:
    rng = random.Random(0)
    names = ["".join(rng.choices("aB._/\n \u00e9", k=rng.randint(0, 9))) for _ in range(5000)]
    assert any("/" in name and name.count(".") > 1 for name in names)
    for name in names:
        if not name.startswith("__"):
            key, extension = base_plus_ext(name)
            assert split_name(name) == (key, (extension or "").lower())
    assert split_name("__meta__/a.json") == (None, "")


def test_every_cut_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(4))
    raw = path.read_bytes()
    with tarfile.open(path) as tar:
        tar.getmembers()
        end = tar.offset
    for size in [*range(0, end + 512, 512), *range(1, end, 777)]:
        cut = copied(path, "cut.tar", raw[:size])
        with pytest.raises(DataError, match=r"cut\.tar: .* at byte \d+: cut, damaged"):
            Index.open([cut])
    for blocks in (1, 2):  # a lone zero block: all members are there
        assert Index.open([copied(path, f"whole{blocks}.tar", raw[: end + 512 * blocks])]).counts == [4]


@pytest.mark.skipif(TAR is None, reason="needs GNU tar")
@pytest.mark.parametrize("record", [["-b", "1"], ["-b", "40"], ["-b", "2048"], ["--record-size=64K"]])
def test_zeros_may_fill_a_record_of_any_size(tmp_path: Path, record: list[str]) -> None:
    (tmp_path / "k.txt").write_text("a")
    path = tmp_path / "a.tar"
    subprocess.run([str(TAR), *record, "-C", str(tmp_path), "-cf", str(path), "k.txt"], check=True)
    index = Index.open([path])
    assert (index.counts, index.shards[0].sha256) == ([1], hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("content", "zeros"),
    [(b"a", 0), (b"a" * 3584, 20480), (b"a" + bytes(1023), 20480)],
    ids=["none", "page", "content"],
)
def test_an_end_that_could_be_a_cut_or_a_power_cut_is_refused_with_the_way_out(
    tmp_path: Path, content: bytes, zeros: int
) -> None:
    """No zero block, or many after a whole page, or after content that ends in zeros itself."""
    path = write_tar(tmp_path / "a.tar", [("k.bin", content)])
    end = 512 + -(-len(content) // 512) * 512
    os.truncate(path, end)
    os.truncate(path, end + zeros)
    text = rf"no end of archive at byte {end}: cut, .*; or, if it is whole, end it: truncate"
    with pytest.raises(DataError, match=text) as no:
        Index.open([path])
    os.truncate(path, int(str(no.value).rpartition(" ")[2]))
    assert Index.open([path]).counts == [1]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_shard_may_be_named_tar(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    content = write_tar(tmp_path / "plain.tar", numbered(4)).read_bytes()
    (tmp_path / "a.tar").write_bytes(pack(content))
    for _ in range(2):
        index = Index.open(find_shards(str(tmp_path / "a.tar"), DataOptions(cache_dir=str(tmp_path / "cache"))))
        assert index.counts == [4]


def test_no_damage_of_headers_loses_a_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(4))
    raw = path.read_bytes()
    with tarfile.open(path) as tar:
        header = tar.getmembers()[4].offset
    refused = 0
    for byte in range(header, header + 512):
        damaged = bytearray(raw)
        damaged[byte] ^= 0x15
        try:
            bad = copied(path, "bad.tar", bytes(damaged))
            assert Index.open([bad], anew=True).counts == [4]  # what fills up the checksum
        except DataError as error:
            assert f"at byte {header}" in str(error)
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("size", [512, 1024, 20480])
def test_zeros_are_refused_unless_they_are_content(tmp_path: Path, size: int) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(20))
    raw = path.read_bytes()
    with tarfile.open(path) as tar:
        headers = [member.offset for member in tar]
    for header in headers:
        damaged = raw[:header] + bytes(min(size, len(raw) - header)) + raw[header + size :]
        if not any(damaged[header:]):
            continue  # byte for byte a shard without these members
        with pytest.raises(DataError, match=rf"no end of archive at byte {header}"):
            Index.open([copied(path, "zeros.tar", damaged)])


def test_pages_that_a_power_cut_left_unwritten_are_no_end_marker(tmp_path: Path) -> None:
    """The length is right, the last pages are zeros: within content, or, as at byte 20480, from a header on."""
    path = write_tar(tmp_path / "a.tar", numbered(40))
    raw = path.read_bytes()
    with tarfile.open(path) as tar:
        ends = [member.offset for member in tar][1:]
    pages = range(4096, len(raw) - 2 * LONGEST_END, 4096)
    assert not set(pages).isdisjoint(ends)
    for page in pages:
        with pytest.raises(DataError, match=rf"no end of archive at byte {min(e for e in ends if e >= page)}"):
            Index.open([copied(path, "tail.tar", raw[:page] + bytes(len(raw) - page))])


def test_archives_that_are_not_plain_tars_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(4))

    others = {"a.tar.gz": gzip.compress(path.read_bytes()), "text.tar": b"hello\n" * 1000, "empty.tar": b""}
    others["two.tar"] = path.read_bytes() * 2
    for name, content in others.items():
        with pytest.raises(DataError, match=name):
            Index.open([copied(path, name, content)])


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    old, new = tarfile.TarInfo("a.bin"), tarfile.TarInfo("a.bin")
    old.type = tarfile.GNUTYPE_SPARSE
    new.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    for info, tar_format in ((old, tarfile.GNU_FORMAT), (new, tarfile.PAX_FORMAT)):
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w", format=tar_format) as tar:
            tar.addfile(info)
        with pytest.raises(DataError, match="sparse"):
            Index.open([path])


def test_headers_that_lead_astray_are_refused(tmp_path: Path) -> None:
    """With checksums that are right. Trusted, a negative size is a walk without end, and a large one all memory."""
    for fields in ({"size": "-1024"}, {"size": "x"}):
        info = tarfile.TarInfo("a.bin")
        info.pax_headers = fields
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(info)
        with pytest.raises(DataError, match="bad extended header"):
            Index.open([tmp_path / "a.tar"])
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "a.bin"}) as tar:
        tar.addfile(tarfile.TarInfo("b.bin"))
    with pytest.raises(DataError, match="bad extended header"):
        Index.open([tmp_path / "a.tar"])
    for kind in (tarfile.REGTYPE, tarfile.XHDTYPE):
        info = tarfile.TarInfo("a.bin")
        info.size, info.type = 2**80, kind
        (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
        with pytest.raises(DataError, match=r"bad extended header \(\d+ bytes\)|no end of archive"):
            Index.open([tmp_path / "a.tar"])
    header = bytearray(tarfile.TarInfo("a.bin").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(DataError, match=r"negative size\) at byte 0"):
        Index.open([tmp_path / "a.tar"])


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.JPG", b"2")])
    with pytest.raises(DataError, match=r"a\.tar: two members 'jpg' of 'a', at byte 1024"):
        Index.open([path])


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
    third = Index.open([path], lambda *call: calls.append(call), anew=True)
    assert (third.counts, len(calls)) == ([6], 2)
    assert third.fingerprint != first.fingerprint
    with pytest.raises(DataError, match=r"a\.tar\.idx: changed during the run"):
        first.samples(0)


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
    assert Index.open(paths, anew=True).fingerprint != first.fingerprint
    assert Index.open(paths).fingerprint != first.fingerprint


def test_a_killed_process_leaves_nothing_beside_shards(tmp_path: Path) -> None:
    """The next start deletes a temporary file of an index, once nobody can be writing it. The user's files stay."""
    shard = write_tar(tmp_path / "a.tar", numbered(3))
    names = [".0123456789abcdef.tmp", ".fedcba9876543210.tmp", ".0123456789abcdee.tmp", ".mine.tmp", ".tmpa1B2c3"]
    left, young, folder, *mine = (tmp_path / name for name in names)
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
    for bad in (b"", b"garbage", good[:100], good[:-1], bytes(len(good)), good.replace(b'"sha256"', b'"sha255"')):
        stored.write_bytes(bad)
        caplog.clear()
        index = Index.open([path])
        assert (index.fingerprint, rows(index)) == (fingerprint, expected)
        assert "can't be read" in caplog.text


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


def test_where_the_folder_takes_no_index_the_cache_does(tmp_path: Path, home: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    (tmp_path / "a.tar.idx").mkdir()  # a file can't take its place, not even root's
    first = Index.open([path])
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
    with pytest.raises(DataError, match=r"no place for its index .*\.cache/echelon/index"):
        Index.open([path])


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


def test_find_shards(tmp_path: Path) -> None:
    names = [f"train-{i:03d}.tar" for i in range(12)] + ["val-[0].tar", "train-000.tar.idx"]
    for name in names:
        (tmp_path / name).touch()
    train = [tmp_path / name for name in names[:12]]
    assert find_shards(f"{tmp_path}/train-*") == train
    assert find_shards(tmp_path / "train-{000..011}.tar") == train
    assert find_shards([tmp_path / "train-0{10,11}.tar", str(train[3]), tmp_path / "val-[0].tar"]) == [
        *(train[i] for i in (3, 10, 11)),
        tmp_path / "val-[0].tar",
    ]
    for bad, text in (
        ("train-{000..012}.tar", r"train-012\.tar \(of .*train-\{000\.\.012\}\.tar\): no such file"),
        ("test-*.tar", r"test-\*\.tar: no such file"),
        ("train-{000.tar", "not a pattern"),
        ("", "no such file"),
    ):
        with pytest.raises(DataError, match=text):
            find_shards(f"{tmp_path}/{bad}")
