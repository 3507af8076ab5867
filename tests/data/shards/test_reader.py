"""Samples from shards: the same as webdataset's, checked, decoded without pickle; and shards, the same each time."""

import errno
import io
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save
from webdataset.tariterators import group_by_keys, tar_file_expander

import trainer.data.shards.index_file as stored_module
import trainer.data.shards.reader as read_module
from trainer.data.sampling.order import Ref, walk
from trainer.data.shards.decoders import DECODERS, decode
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.tar import _header as read_header
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import DataError, UnavailableError

TAR = shutil.which("tar")
NUMBERS = np.arange(12, dtype=np.uint16).reshape(3, 4)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


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
    return [reader.read(ref) for ref in walk(counts, 0, 1)]


def webdatasets(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as stream:
        samples = list(group_by_keys(tar_file_expander([{"url": "", "stream": stream}])))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


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


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3, np.float16),
        np.zeros((0, 4), np.int8),
        np.array([(1, 2.0)], [("a", "i1"), ("b", "<f8")]),
        np.array(["ab", "c"]),
        np.array([b""], "S0"),
    ],
    ids=lambda value: str(value.dtype)[:20],
)
def test_arrays_are_numpys(value: np.ndarray) -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        file = io.BytesIO()
        np.lib.format.write_array(file, value, version)
        found, expected = (
            decode("npy", file.getvalue() + b"more"),
            np.lib.format.read_array(io.BytesIO(file.getvalue())),
        )
        assert (found.dtype, found.shape, found.strides) == (expected.dtype, expected.shape, expected.strides)
        assert found.tobytes() == expected.tobytes() and found.flags.writeable
        with pytest.raises(ValueError):
            decode("npy", file.getvalue()[:-1] if value.nbytes else file.getvalue()[:90])


def test_members_decode_by_their_last_extension(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (5, 7, 4), dtype=np.uint8)
    images = {}
    for name, kind in (("png", "PNG"), ("webp", "WEBP"), ("jpg", "JPEG"), ("jpeg", "JPEG")):
        buffer = io.BytesIO()
        Image.fromarray(picture[..., :3] if kind == "JPEG" else picture).save(buffer, kind, lossless=True)
        images[name] = buffer.getvalue()
    array = io.BytesIO()
    np.save(array, NUMBERS)
    reader = shard_of(
        tmp_path / "a.tar",
        **images,
        json=json.dumps({"a": [1, None]}).encode(),
        txt="\u00e4".encode(),
        caption_text=b"two words",
        cls=b"7\n",
        int=b"-3",
        npy=array.getvalue(),
        left_NPY=array.getvalue(),
        safetensors=save({"ids": NUMBERS}),
        bin=b"\0\1",
        npy_zst=b"as it is",
    )
    sample = reader.read(Ref(0, 0, 0))
    for name in images:
        image = sample.pop(name)
        assert (image.mode, image.size) == ("RGB", (7, 5))
        if name in ("png", "webp"):
            opaque = picture[..., 3] > 0
            assert np.array_equal(np.asarray(image)[opaque], picture[..., :3][opaque])
    for name in ("npy", "left.npy"):
        value = sample.pop(name)
        assert value.dtype == np.uint16 and np.array_equal(value, NUMBERS) and value.flags.writeable
    ids = sample.pop("safetensors")["ids"]
    assert ids.dtype == np.uint16 and np.array_equal(ids, NUMBERS) and ids.flags.writeable
    expected = {
        "__key__": "k",
        "json": {"a": [1, None]},
        "txt": "\u00e4",
        "caption.text": "two words",
        "cls": 7,
        "int": -3,
    }
    assert sample == expected | {"bin": b"\0\1", "npy.zst": b"as it is"}


class Payload:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Payload, "ran", True)


@pytest.mark.parametrize("extension", ["pyd", "pickle", "pkl", "pth", "pt", "a_PKL", "npy"])
def test_pickles_are_refused_unread(tmp_path: Path, extension: str) -> None:
    content = pickle.dumps(Payload())
    if extension == "npy":
        buffer = io.BytesIO()
        np.save(buffer, np.array([Payload()], dtype=object), allow_pickle=True)
        content = buffer.getvalue()
    reader = shard_of(tmp_path / "a.tar", **{extension: content})
    with pytest.raises(DataError, match=r"a\.tar: sample 0 \('k'\), member .* can't be decoded"):
        reader.read(Ref(0, 0, 0))
    assert not Payload.ran
    pickle.loads(pickle.dumps(Payload()))
    assert Payload.ran  # so it would have
    Payload.ran = False


@pytest.mark.parametrize("extension", ["jpg", "png", "json", "txt", "cls", "npy", "safetensors"])
def test_what_cannot_be_decoded_is_named(tmp_path: Path, extension: str) -> None:
    reader = shard_of(tmp_path / "a.tar", **{extension: b"\xff garbage"})
    with pytest.raises(DataError, match=rf"a\.tar: sample 0 \('k'\), member '{extension}': can't be decoded") as caught:
        reader.read(Ref(0, 0, 0))
    assert "\n" not in str(caught.value)


@pytest.fixture
def three(tmp_path: Path) -> ShardReader:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(3):
            add(tar, f"{i}.bin", bytes([i]) * 700)
    return ShardReader(Index.open([path]))


def test_a_flipped_bit_costs_its_own_sample_only(three: ShardReader, sleeps: list[float]) -> None:
    path = three.index.shards[0].path
    raw = bytearray(path.read_bytes())
    offset, length, _ = three.index.samples(0)[1].tolist()
    for byte in range(offset, offset + length, 100):
        damaged = raw.copy()
        damaged[byte] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(
            DataError, match=rf"a\.tar: sample 1 \(('1'|None)\): the checksum .* at byte {offset} differs"
        ):
            three.read(Ref(0, 0, 1))
        assert [three.read(Ref(0, 0, i))["bin"][0] for i in (0, 2)] == [0, 2]
    assert len(sleeps) == 2 * len(range(offset, offset + length, 100))


def test_a_bad_sample_is_named(three: ShardReader, sleeps: list[float]) -> None:
    """By its shard and its key, if only the content is damaged."""
    path = three.index.shards[0].path
    offsets = [three.index.samples(0)[i].tolist()[0] for i in range(3)]
    raw = bytearray(path.read_bytes())
    raw[offsets[1] + 600] ^= 1
    raw[offsets[2] + 5] ^= 1
    path.write_bytes(raw)
    good, bad = Samples(three, [3], "", None, 0).batch([Ref(4, 0, i) for i in range(3)])
    assert len(good) == 1
    lines = [each.line for each in bad]
    assert [line.pop("error").rpartition(", read")[0].count("the checksum of") for line in lines] == [1, 1]
    assert lines == [
        {"epoch": 4, "shard": str(path), "offset": offset, "key": key} for offset, key in ((1, "1"), (2, None))
    ]


def test_a_shard_that_shrinks_during_the_run_is_noticed(three: ShardReader, sleeps: list[float]) -> None:
    assert three.read(Ref(0, 0, 2))["bin"] == b"\2" * 700
    os.truncate(three.index.shards[0].path, 2000)
    with pytest.raises(DataError, match=r"sample 1 .* checksum"):
        three.read(Ref(0, 0, 1))
    with pytest.raises(DataError, match=r"sample 2 .* checksum"):
        three.read(Ref(0, 0, 2))


def test_what_passes_is_read_again(three: ShardReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard away for a moment, and one whose open file gives wrong bytes."""
    path = three.index.shards[0].path
    away = path.rename(path.with_name("away"))
    monkeypatch.setattr(time, "sleep", lambda seconds: away.rename(path))
    assert three.read(Ref(0, 0, 1))["bin"] == b"\1" * 700

    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    away.write_bytes(good)
    assert three.read(Ref(0, 0, 1))["bin"] == b"\1" * 700


@pytest.mark.parametrize("timeout_s", [math.inf, 20.0])
def test_a_shard_that_stays_away_is_not_damaged(
    three: ShardReader, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute is waited for it, and less than others wait for the sample."""
    three.index.shards[0].path.unlink()
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    waits = 30 if timeout_s > 60 else 10
    with pytest.raises(UnavailableError, match=rf"a\.tar: No such file or directory, for {waits} s; see to the disk"):
        ShardReader(three.index, timeout_s=timeout_s).read(Ref(0, 0, 1))
    assert waits - 3 < clock[0] - 100 <= waits


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize(("module", "call"), [(os, "pread"), (read_module, "opened"), (stored_module, "safe_open")])
def test_what_the_system_can_not_do_damages_no_sample(
    three: ShardReader, number: int, module: Any, call: str, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    """It is tried again, and what passes is as if it had not been."""
    working, calls = getattr(module, call), []

    def fail(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        if len(calls) <= fails:
            raise OSError(number, os.strerror(number))
        return working(*arguments, **keywords)

    monkeypatch.setattr(module, call, fail)
    fails = 3
    assert three.read(Ref(0, 0, 1))["bin"] == b"\1" * 700
    assert len(sleeps) == 3

    fails = 99
    source = Samples(ShardReader(three.index, timeout_s=0.1), [3], "", None, 0)
    with pytest.raises(UnavailableError, match=os.strerror(number)):
        source.batch([Ref(0, 0, 1)])


def test_an_index_that_is_gone_damages_no_sample(three: ShardReader) -> None:
    three.index.shards[0].index_path.unlink()
    with pytest.raises(UnavailableError, match=r"a\.tar\.idx: No such file or directory, for 0\.05 s; see to the disk"):
        ShardReader(three.index, timeout_s=0.1).read(Ref(0, 0, 1))


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (MemoryError(), MemoryError),
        (OSError(errno.EIO, "Input/output error"), UnavailableError),
        (OSError("broken data stream"), DataError),  # as Pillow has it
    ],
)
def test_a_decoder_that_fails_for_want_of_something(
    three: ShardReader, raised: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> None:
        raise raised

    monkeypatch.setitem(DECODERS, "bin", fail)
    with pytest.raises(kind):
        three.read(Ref(0, 0, 1))


def test_a_read_that_stops_short_goes_on(
    three: ShardReader, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 100), offset))
    assert three.read(Ref(0, 0, 1))["bin"] == b"\1" * 700
    assert not sleeps


def test_the_reader_travels_without_its_files(three: ShardReader) -> None:
    sample = three.read(Ref(0, 0, 1))
    size = len(pickle.dumps(three))
    assert size < 2000  # no rows of the index either
    assert pickle.loads(pickle.dumps(three)).read(Ref(3, 0, 1)) == sample


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "OPEN_SHARDS", 3)
    paths = write_shards(({"__key__": str(i), "cls": i} for i in range(8)), tmp_path, "s", per_shard=1)
    reader = ShardReader(Index.open(paths))
    before = len(os.listdir("/dev/fd"))
    assert [reader.read(Ref(0, i, 0))["cls"] for i in (*range(8), *range(8))] == [*range(8), *range(8)]
    assert len(os.listdir("/dev/fd")) == before + 3


def test_prefetch_advises_the_samples_bytes(three: ShardReader, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: advice.append((os.fstat(fd).st_ino, *rest)))
    three.prefetch([Ref(0, 0, 2), Ref(0, 0, 0)])
    inode = three.index.shards[0].path.stat().st_ino
    rows = three.index.samples(0)
    assert advice == [(inode, *rows[i].tolist()[:2], os.POSIX_FADV_WILLNEED) for i in (0, 2)]


def samples() -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"f/{i:03d}",
            "ids.npy": NUMBERS + i,
            "cls": i,
            "int": -i,
            "json": {"i": i},
            "txt": "\u00e4" * i,
            "bin": b"\0",
        }
        | {"safetensors": {"x": NUMBERS}, "png": np.full((2, 3, 3), i, np.uint8)}
        for i in range(10)
    ]


def test_written_shards_read_back(tmp_path: Path) -> None:
    paths = write_shards(iter(samples()), tmp_path / "new/folder", "train", per_shard=4)
    assert [path.name for path in paths] == [f"train-00000{i}.tar" for i in range(3)]
    assert sorted(tmp_path.glob("new/folder/*")) == paths
    reader = ShardReader(Index.open(paths))
    assert reader.index.counts == [4, 4, 2]
    for expected, sample in zip(samples(), read_all(reader), strict=True):
        assert sample.keys() == expected.keys()
        for name in ("__key__", "cls", "int", "json", "txt", "bin"):
            assert sample[name] == expected[name]
        assert np.array_equal(sample["ids.npy"], expected["ids.npy"])
        assert np.array_equal(sample["safetensors"]["x"], NUMBERS)
        assert np.array_equal(np.asarray(sample["png"]), expected["png"])


def test_the_same_samples_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_shards(samples(), tmp_path / "1", "train", per_shard=4)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    second = write_shards(samples(), tmp_path / "2", "train", per_shard=4)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_shards_are_not_mixed_with_older_ones(tmp_path: Path) -> None:
    write_shards(samples(), tmp_path, "train", per_shard=4)
    with pytest.raises(DataError, match=r"train-00000\d\.tar: is there already"):
        write_shards(samples()[:1], tmp_path, "train", per_shard=4)
    assert len(write_shards(samples(), tmp_path, "val", per_shard=5)) == 2
    assert write_shards([], tmp_path, "none", per_shard=5) == []


def test_a_failure_leaves_no_cut_shard(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"000002\.tar: 'last'\.unknown: no encoder for object; give bytes"):
        write_shards([*samples(), {"__key__": "last", "unknown": object()}], tmp_path, "train", per_shard=4)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tar"] * 2


@pytest.mark.parametrize("keys", [["a.b"], ["a", "a"], [""], ["__meta__/a"]])
def test_keys_that_would_not_read_back_are_refused(tmp_path: Path, keys: list[str]) -> None:
    with pytest.raises(DataError, match=f"key {keys[-1]!r}: must be unique"):
        write_shards([{"__key__": key, "cls": i} for i, key in enumerate(keys)], tmp_path, "train", per_shard=4)
