"""Samples from shards: the same as webdataset's, checked, decoded without pickle; and shards, the same each time."""

import errno
import io
import json
import math
import os
import pickle
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save
from support.tars import add, shard_of

import trainer.data.shards.index_file as stored_module
import trainer.data.shards.reader as read_module
from trainer.data.sampling.order import Ref, Refs
from trainer.data.shards.decoders import DECODERS
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import DataError, UnavailableError

NUMBERS = np.arange(12, dtype=np.uint16).reshape(3, 4)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


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
    good, bad = Samples(three, [3], "", None, 0).batch(Refs([Ref(4, 0, i) for i in range(3)]))
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
    with pytest.raises(UnavailableError, match=rf"a\.tar: No such file or directory, for {waits} s; check the disk"):
        ShardReader(three.index, timeout_s=timeout_s).read(Ref(0, 0, 1))
    assert waits - 3 < clock[0] - 100 <= waits


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize(
    ("module", "call"),
    [(os, "preadv"), (read_module, "opened"), (stored_module, "safe_open"), (torch, "from_file")],
)
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
        source.batch(Refs([Ref(0, 0, 1)]))


def test_an_index_that_is_gone_damages_no_sample(three: ShardReader) -> None:
    three.index.shards[0].index_path.unlink()
    with pytest.raises(UnavailableError, match=r"a\.tar\.idx: No such file or directory, for 0\.05 s; check the disk"):
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
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:100]], offset))
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
    three.prefetch(Refs([Ref(0, 0, 2), Ref(0, 0, 0)]))
    inode = three.index.shards[0].path.stat().st_ino
    rows = three.index.samples(0)
    assert advice == [(inode, *rows[i].tolist()[:2], os.POSIX_FADV_WILLNEED) for i in (0, 2)]
