"""Tars of every kind are read as tarfile and webdataset read them; damage is an error."""

import gzip
import hashlib
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.tars import add, copied, numbered, read_all, webdatasets, write_tar
from webdataset.tariterators import base_plus_ext

from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.tar import _header as read_header
from trainer.data.shards.tar import split_name
from trainer.errors import DataError

pytestmark = pytest.mark.usefixtures("home")

TAR = shutil.which("tar")


def fuzz(path: Path, seed: int) -> None:
    """A tar with all that may be in one, and few keys, so that neighbours share them."""
    rng = random.Random(seed)
    folders = ["", "a/", "a.b/", "./", "__meta__/", "x" * 90 + "/" + "y" * 90 + "/"]
    keys = ["k", "K2", "k 3", "__k__", "\u00e4\u4e2d", "z" * 120, "", "\udcff"]
    extensions = ["bin", "BIN", "seg.bin", "Seg.Bin.x", "", "dat", ".dat"]
    tar_format = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    global_fields = {"comment": "of all members"} if tar_format == tarfile.PAX_FORMAT and rng.random() < 0.5 else {}
    with tarfile.open(path, "w", format=tar_format, pax_headers=global_fields) as tar:
        for _ in range(rng.randint(1, 30)):
            folder, key, content = (
                rng.choice(folders),
                rng.choice(keys),
                rng.randbytes(rng.choice([0, 1, 511, 512, 513, 3000])),
            )
            kind = rng.random()
            if kind < 0.1:
                add(tar, f"{folder}{key}.bin", kind=tarfile.DIRTYPE, size=rng.choice([0, 600]))
            elif kind < 0.2:
                add(
                    tar,
                    f"{key}.bin",
                    kind=rng.choice([tarfile.SYMTYPE, tarfile.LNKTYPE]),
                    linkname="l" * rng.choice([1, 150]),
                )
            elif kind < 0.25:
                add(tar, rng.choice(["README", "__index__", "a/README", "z" * 120 + ".bin/"]), content)
            elif kind < 0.3:
                add(tar, f"{folder}{key}.old", content, rng.choice([tarfile.AREGTYPE, tarfile.CONTTYPE, b"Z"]))
            else:
                names = rng.sample(extensions, rng.randint(1, 3))
                for extension in names:
                    add(tar, f"{folder}{key}.{extension}", content, mtime=rng.choice([0, 1.5]))


def test_samples_are_webdatasets(tmp_path: Path) -> None:
    same = refused = 0
    for seed in range(150):
        path = tmp_path / f"{seed}.tar"
        fuzz(path, seed)
        try:
            expected = webdatasets(path)
        except ValueError as error:
            assert "duplicate file name" in str(error)
            with pytest.raises(DataError, match="two members"):
                Index.open([path])
            refused += 1
            continue
        if expected:
            reader = ShardReader(Index.open([path]))
            assert read_all(reader) == expected
            same += len(expected)
    assert same > 500 and 5 < refused < 100, (same, refused)


def fuzz_files(folder: Path, seed: int, longest: int) -> list[str]:
    """Files of odd names, of at most `longest` bytes after the last slash; in the order that tar shall have."""
    rng = random.Random(seed)
    names: dict[str, None] = {}
    for _ in range(40):
        where = rng.choice(["", "a/", "a.b/", "\u00e4/b/", "x" * 60 + "/" + "y" * 70 + "/"])
        key = rng.choice(["k", "K 2", "\u4e2d\u00e9", "-", "__k__", "n" * 90, "m" * 180, "\udcff", "a'b\\c\n"])
        for extension in rng.sample(["bin", "BIN.x", "seg.map", "n", "dat.", ".dat", "\u00fc"], 2):
            name = f"{where}{key}.{extension}"
            if len(os.fsencode(Path(name).name)) <= longest:
                names[name] = None
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice([0, 1, 511, 512, 513, 3000])))
    return list(names)


@pytest.mark.skipif(TAR is None, reason="needs GNU tar")
@pytest.mark.parametrize(("form", "longest"), [("gnu", 255), ("pax", 255), ("ustar", 99)])
def test_what_gnu_tar_writes_is_read_as_webdataset_reads_it(tmp_path: Path, form: str, longest: int) -> None:
    read = 0
    for seed in range(8):
        files, path = tmp_path / f"{seed}", tmp_path / f"{seed}.tar"
        files.mkdir()
        names = fuzz_files(files, seed, longest)
        listed = b"".join(os.fsencode(name) + b"\0" for name in names)
        words = [TAR, f"--format={form}", "--null", "--verbatim-files-from", "-C", files, "-T", "-", "-cf", path]
        done = subprocess.run([str(word) for word in words], input=listed, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        expected = webdatasets(path)
        assert read_all(ShardReader(Index.open([path]))) == expected
        read += len(expected)
    assert read > 80, read


@pytest.mark.parametrize("prefix", [b"", b"folder"])
def test_old_and_large_headers(tmp_path: Path, prefix: bytes) -> None:
    """ustar's split names, and sizes in base 256."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        add(tar, "p" * 100 + "/" + "n" * 90 + ".bin", b"ustar")
    raw = bytearray(path.read_bytes())
    raw[124:136] = bytes([0x80]) + (5).to_bytes(11, "big")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    path.write_bytes(raw)
    assert (
        read_all(ShardReader(Index.open([path])))
        == webdatasets(path)
        == [{"__key__": "p" * 100 + "/" + "n" * 90, "bin": b"ustar"}]
    )


def damaged_header(rng: random.Random) -> bytes:
    """As tarfile writes it, then up to three fields changed, and mostly a checksum that is right."""
    name = "/".join(rng.choice(("p" * 70, "\u00e4" * 9, "n.a")) for _ in range(rng.randint(1, 3)))
    form, most = rng.choice(((tarfile.USTAR_FORMAT, 33), (tarfile.GNU_FORMAT, 40)))
    info = tarfile.TarInfo(name)
    info.size, info.type = (
        rng.randrange(1 << most),
        rng.choice([b"V", *tarfile.SUPPORTED_TYPES[:-1]]),
    )  # less sparse files
    block = bytearray(info.tobuf(form)[-tarfile.BLOCKSIZE :])
    for start, stop in rng.sample(((0, 100), (124, 125), (124, 136), (156, 157), (345, 346), (345, 500)), 2):
        if rng.random() < 0.4:
            block[rng.randrange(start, stop)] = rng.choice((0, 32, 47, 49, 56, 128, 255))
    unsigned = 256 + sum(block) - sum(block[148:156])
    checksum = rng.choice((unsigned, unsigned, unsigned - 256 * sum(byte > 127 for byte in block), 77))
    block[148:156] = b"%06o\0 " % checksum
    return bytes(block)


def test_headers_are_read_as_tarfile_reads_them() -> None:
    rng, good = random.Random(0), 0
    for _ in range(5000):
        block = damaged_header(rng)
        try:
            expected = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            good += 1
        except tarfile.HeaderError:
            expected = None
        if expected is None or expected.size < 0:
            with pytest.raises(DataError):
                read_header(block, "x", 0)
        else:
            found = read_header(block, "x", 0)
            name = found.name.rstrip("/") if expected.isdir() else found.name
            assert (found.type, found.size, name) == (expected.type, expected.size, expected.name)
    assert 1000 < good < 4500


TAR = shutil.which("tar")


LONGEST_END = 1024 + 10240  # the end marker, filled up to a record of 20 blocks


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
            assert Index.open([bad], rebuild=True).counts == [4]  # what fills up the checksum
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
