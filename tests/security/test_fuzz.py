"""Bytes that nobody would think of, for what reads a stranger's files: our error, or what is right; never a hang.

Deterministic (tests/conftest.py): a failure comes back as it was.
"""

import contextlib
import hashlib
import io
import json
import tarfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.checkpoints import put
from support.messages import refuses
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from trainer.checkpoint.manifest import MANIFEST, Damaged, verify
from trainer.checkpoint.serialize import load_state
from trainer.checks.plan import refuse_other_manifests
from trainer.data.images import Jpeg, LazyJpeg
from trainer.data.sampling.order import Ref
from trainer.data.shards.decoders import decode, image_of_bytes
from trainer.data.shards.index import Index, scan_shard
from trainer.data.shards.index_file import content_of, places_of
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.tar import BLOCK, LONGEST_FIELDS, META, Member, members
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError

FIXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TYPES = [tarfile.REGTYPE] * 5 + [
    tarfile.AREGTYPE,
    tarfile.CONTTYPE,
    b"Z",
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
]
WORDS = st.text(st.sampled_from("aB._/ -\u00e4\u4e2d\n"), max_size=12) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200
)
NAMES = WORDS | st.builds("{}.{}".format, WORDS, st.sampled_from(["jpg", "JPG", "seg.Png", "", "json"]))
ENTRIES = st.tuples(NAMES, st.sampled_from(TYPES), st.binary(max_size=1200), st.dictionaries(WORDS, WORDS, max_size=2))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Reads that are tried again don't wait, and what takes long is a hang."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 60


def archive(entries: list[tuple[str, bytes, bytes, dict[str, str]]], tar_format: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as tar:
        for name, kind, content, fields in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, name if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            old_folder = kind == tarfile.AREGTYPE and name.endswith("/")
            info.size = len(content) if info.isreg() and not old_folder else 0
            own = {key: value for key, value in fields.items() if key and "=" not in key}
            info.pax_headers = own if tar_format == tarfile.PAX_FORMAT else {}
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


TARS = st.builds(archive, st.lists(ENTRIES, max_size=8), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))


def walk(content: bytes) -> list[Member]:
    """All members. Asks for a bounded number of bytes at a time, and of times."""
    asked = 0

    def fetch(offset: int, size: int) -> bytes:
        nonlocal asked
        asked += 1
        assert 0 <= size <= max(BLOCK, LONGEST_FIELDS) and asked <= 2 * len(content) // BLOCK + 3
        return content[offset : offset + size]

    return list(members(fetch, Path("a.tar")))


def tarfiles(content: bytes) -> list[tuple[str | None, str, bytes]]:
    """Key, extension and content of each entry, as Python's tarfile and webdataset's rule have them."""
    found: list[tuple[str | None, str, bytes]] = []
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for info in tar:
            key, extension = base_plus_ext(info.name) if info.isreg() and not META.match(info.name) else (None, None)
            file = tar.extractfile(info) if info.isreg() else None
            found.append((key, (extension or "").lower() if key else "", file.read() if file else b""))
    return found


@pytest.mark.slow
@settings(FIXED, max_examples=600)
@given(TARS)
def test_any_tar_is_read_as_tarfile_reads_it(content: bytes) -> None:
    found = walk(content)
    ours = [(m.key, m.extension, content[m.content : m.content + m.size] if m.size else b"") for m in found]
    theirs = tarfiles(content)
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    assert [own for own in ours if own[0]] == [entry for entry in theirs if entry[0]]


META_KEYS = ("__key__", "__url__", "__local_path__")  # what webdataset adds


@settings(FIXED, max_examples=100)
@given(content=TARS)
def test_any_tar_is_grouped_as_webdataset_groups_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    try:
        expected = list(group_by_keys(tar_file_expander([{"url": "", "stream": io.BytesIO(content)}])))
    except ValueError:  # two of one name
        with pytest.raises(DataError, match="two members"):
            scan_shard(path)
        return
    rows = scan_shard(path)[0].tolist()
    assert len(rows) == len(expected)
    for (offset, length, _), sample in zip(rows, expected):
        part = content[offset : offset + length]
        ours = {m.extension: part[m.content : m.content + m.size] for m in walk(part) if m.key}
        assert ours == {name: value for name, value in sample.items() if name not in META_KEYS}


CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=12) | st.sampled_from([b"", b"9" * 8, b"\x80"])),
    min_size=1,
    max_size=4,
)


def changed(content: bytes, changes: list[tuple[int, bytes]]) -> bytearray:
    """Bytes put in place of others; none at all cuts the rest off."""
    made = bytearray(content)
    for at, new in changes:
        if made:
            at %= len(made)
            made[at : at + len(new) if new else len(made)] = new
    return made


def sealed(content: bytearray) -> bytes:
    """With the checksum right in every block that may be a header, so that what it says is believed."""
    for start in range(0, len(content) - BLOCK + 1, BLOCK):
        block = content[start : start + BLOCK]
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(content)


@pytest.mark.slow
@settings(FIXED, max_examples=1500)
@given(TARS, CHANGES, st.booleans())
def test_a_changed_tar_is_refused_or_read_as_tarfile_reads_it(content: bytes, changes: Any, seal: bool) -> None:
    made = changed(content, changes)
    made = sealed(made) if seal else bytes(made)
    try:
        ours = [(m.key, m.extension, made[m.content : m.content + m.size]) for m in walk(made) if m.key]
    except DataError as error:
        assert str(error).startswith("a.tar: ") and "\n" not in str(error)
        return
    try:
        theirs = [entry for entry in tarfiles(made) if entry[0]]
    except Exception:  # tarfile raises many things
        return
    assert ours[: len(theirs)] == theirs


@settings(FIXED, max_examples=300)
@given(st.binary(max_size=3000), st.binary(max_size=600))
def test_any_bytes_are_no_tar(content: bytes, record: bytes) -> None:
    """Bare, and as a PAX header of a member."""
    info = tarfile.TarInfo("a.bin")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    padded = record + bytes(-len(record) % BLOCK)
    member = tarfile.TarInfo("b.bin").tobuf(tarfile.USTAR_FORMAT)
    for each in (content, info.tobuf(tarfile.USTAR_FORMAT) + padded + member + bytes(1024)):
        with contextlib.suppress(DataError):
            walk(each)


@pytest.mark.parametrize(
    "record",
    [
        b"5 a=\n" * 200_000,  # short ones: cutting each off would copy all that follows
        b"%d path=%s.b\n" % (14 + 10_000 * 2, b"/a" * 10_000),
        b"30 size=" + b"9" * 21 + b"\n",
        b"5010 size=" + b"9" * 4999 + b"\n",
        b"-5 a=\n",
        b"99 path=a.b\n",
        b" " * 1000,
        b"9" * 5000,
    ],
)
def test_records_that_would_take_all_time_or_lie(record: bytes) -> None:
    info = tarfile.TarInfo("a.bin")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    content = info.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % BLOCK)
    content += tarfile.TarInfo("b.bin").tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
    began = time.process_time()
    try:
        assert [member.key for member in walk(content)] == ["b"]
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    assert time.process_time() - began < 5


def test_an_extended_header_of_gigabytes_is_not_read() -> None:
    info = tarfile.TarInfo("a.bin")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    with refuses("a.tar", "extended", kind=DataError):
        walk(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = ({"__key__": str(i), "bin": bytes([i]) * (100 + i)} for i in range(6))
    return write_shards(samples, tmp_path_factory.mktemp("shard"), "a", per_shard=6)[0]


def forget(shard: Path) -> None:
    """Remove the index, wherever it was stored: what is no index of ours stays in its place."""
    for place in places_of(shard):
        place.unlink(missing_ok=True)


def forged(shard: Path, rows: bytes) -> bytes:
    """An index of these rows, with the checksum of them."""
    forget(shard)
    return content_of(Index.open([shard]).shards[0], np.frombuffer(rows, np.int64).reshape(6, 3))


def refuse_or_right(shard: Path, index: bytes) -> None:
    """Whatever the stored index is: made again, refused, or each sample is what it was."""
    Path(f"{shard}.idx").write_bytes(index)
    try:
        opened = Index.open([shard])
    except DataError:
        return
    reader = ShardReader(opened)
    assert opened.counts == [6]
    for i in range(6):
        try:
            assert reader.read(Ref(0, 0, i)) == {"__key__": str(i), "bin": bytes([i]) * (100 + i)}
        except DataError as error:
            assert str(shard) in str(error) and "\n" not in str(error)
    reader.close()


@settings(FIXED, max_examples=100)
@given(changes=CHANGES, tail=st.booleans())
def test_a_changed_index_gives_no_wrong_sample(shard: Path, changes: Any, tail: bool) -> None:
    """In its header, or in its rows."""
    forget(shard)
    Index.open([shard])
    good = Path(f"{shard}.idx").read_bytes()
    rows = bytes(changed(good[-144:], changes))[:144].ljust(144, b"\0")
    refuse_or_right(shard, forged(shard, rows) if tail else bytes(changed(good, changes)))


@settings(FIXED, max_examples=40)
@given(index=st.binary(max_size=400), header=st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.integers()))
def test_any_bytes_are_no_index(shard: Path, index: bytes, header: dict[str, Any]) -> None:
    refuse_or_right(shard, index)
    text = json.dumps({"__metadata__": header, "samples": {"dtype": "I64", "shape": [6, 3], "data_offsets": [0, 144]}})
    refuse_or_right(shard, len(text).to_bytes(8, "little") + text.encode() + bytes(144))


def test_a_row_that_asks_for_all_memory(shard: Path) -> None:
    forget(shard)
    Index.open([shard])
    good = Path(f"{shard}.idx").read_bytes()
    for offset, length in ((0, 1 << 62), (1 << 62, 1), (-512, 512), (512, -512), (1 << 62, 1 << 62)):
        row = offset.to_bytes(8, "little", signed=True) + length.to_bytes(8, "little", signed=True)
        Path(f"{shard}.idx").write_bytes(forged(shard, row + good[-128:]))
        with pytest.raises(DataError, match=r"\.idx: .*: damaged; remove it"):
            ShardReader(Index.open([shard])).read(Ref(0, 0, 0))
    Path(f"{shard}.idx").write_bytes(good)


def test_a_row_of_another_sample_is_seen(shard: Path) -> None:
    """A place that has a sample, and not the one whose checksum is in the row."""
    forget(shard)
    Index.open([shard])
    good = Path(f"{shard}.idx").read_bytes()
    Path(f"{shard}.idx").write_bytes(forged(shard, good[-120:-104] + good[-128:]))
    with pytest.raises(DataError, match=r"sample 0 .*: the checksum of"):
        ShardReader(Index.open([shard])).read(Ref(0, 0, 0))
    more = good.replace(b'"samples":"6"', b'"samples":"9"')
    assert more != good
    refuse_or_right(shard, more)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("x" * 300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["run_dir", "samples", "world", "identity", "buckets", "ddp", "files", "step", "format", "note"]


@settings(FIXED, max_examples=200)
@given(changes=CHANGES)
def test_a_changed_manifest_is_damaged(tmp_path: Path, changes: Any) -> None:
    path, kept = tmp_path / "run" / "step-00000001" / MANIFEST, tmp_path / "kept"
    if not kept.exists():
        put(tmp_path / "run", 1, run_dir="runs/r", metrics={"val/loss": 1.5})
        kept.write_bytes(path.read_bytes())
    good = kept.read_bytes()
    path.write_bytes(changed(good, changes))
    if path.read_bytes() == good:
        verify(path.parent)
        return
    with pytest.raises(Damaged, match=r"^\S+step-00000001/MANIFEST\.json: damaged"):
        verify(path.parent)


@settings(FIXED, max_examples=100)
@given(fields=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1), raw=st.binary(max_size=200), entry=JSON)
def test_any_manifest_whose_sha256_fits(tmp_path: Path, fields: dict[str, Any], raw: bytes, entry: Any) -> None:
    """What verify lets through has files that are there; what a resume then needs of it is checked by its kind."""
    path = tmp_path / "step-00000001" / MANIFEST
    path.parent.mkdir(exist_ok=True)
    files = {"a" * 300: [1, ""]} if "note" in fields else {"MANIFEST.json": entry}
    manifest = {"format": 2, "step": 1, "files": files, **fields}
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    for content in (json.dumps({**manifest, "sha256": digest}, indent=1).encode(), raw):
        path.write_bytes(content)
        try:
            found = verify(path.parent)
        except Damaged as error:
            assert str(path.parent) in str(error)
            continue
        assert found["files"] == {}
        try:
            refuse_other_manifests(found, "trainer.resume=x")
        except ConfigError as error:
            assert "its manifest has no valid " in str(error)


@pytest.mark.slow
@settings(FIXED, max_examples=300)
@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()), kind=st.text(max_size=5))
def test_any_state_is_read_or_damaged(tmp_path: Path, content: bytes, kind: str) -> None:
    wrapped = b'{"model": {"$%s": ' % json.dumps(kind)[1:-1].encode() + content + b"}}"
    for each in (
        content,
        wrapped,
        b'{"model": {"$tuple": ' + content + b"}}",
        b'{"model": {"$dict": ' + content + b"}}",
    ):
        (tmp_path / "state.json").write_bytes(each)
        try:
            assert isinstance(load_state(tmp_path, ["state.json"]), dict)
        except Damaged as error:
            assert "can't be read as a state" in str(error)


def jpeg_of(settings_: dict[str, Any]) -> bytes:
    y, x = np.mgrid[:40, :56]
    file = io.BytesIO()
    image = Image.fromarray(np.stack([x * 4, y * 6, (x * y) % 256], -1).astype(np.uint8))
    image.convert(settings_.get("mode", "RGB")).save(file, "JPEG", progressive=settings_.get("progressive", False))
    return file.getvalue()


JPEGS = [jpeg_of(each) for each in ({}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"})]


@settings(FIXED, max_examples=300)
@given(
    which=st.sampled_from(JPEGS), changes=CHANGES, cut=st.none() | st.integers(0, 900), scale=st.sampled_from([1, 2])
)
def test_any_jpeg_is_decoded_as_pillow_decodes_it_or_refused(
    which: bytes, changes: Any, cut: int | None, scale: int
) -> None:
    """A JPEG that stays compressed is damaged if it is damaged for Pillow, and otherwise has the same pixels."""
    content = bytes(changed(which, changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = np.array(image_of_bytes(content, scale))
        except Exception:  # Pillow may raise anything
            expected = None
        try:
            value = decode("jpg", content, [LazyJpeg()])
            if isinstance(value, Jpeg):
                found = value.decode(scale)
                assert expected is not None and (found == expected).all()
            else:
                assert expected is not None
        except AssertionError:
            raise
        except Exception:
            assert expected is None
