"""Compressed shards: the samples, order and fingerprint of the plain ones; what is cut, damaged or too large, told."""

import bz2
import gzip
import lzma
import random
import resource
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_recipe import Tars, write_points
from support.cli import environment
from support.http import Proxy, needs_nginx, served
from support.loaders import open_loader, whole
from support.messages import refuses
from support.shards import samples

from trainer import timeouts
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.remote.decompress import MOST_AT_ONCE, Gzip, unpack
from trainer.data.remote.eviction import FOLDER
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError
from trainer.process.environment import Place
from trainer.trainer import Trainer

SHARDS, EACH = 4, 6


def several(content: bytes) -> bytes:
    """Members, as pigz and bgzip write them, and zeros up to a block of a tape."""
    return b"".join(gzip.compress(content[i : i + 3000]) for i in range(0, len(content), 3000)) + bytes(512)


KINDS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".tar.gz", gzip.compress),
    "members": (".tar.gz", several),
    "tgz": (".TGZ", gzip.compress),
    "bzip2": (".tar.bz2", lambda content: bz2.compress(content[:9000]) + bz2.compress(content[9000:])),
    "xz": (".tar.xz", lambda content: lzma.compress(content[:9000]) + lzma.compress(content[9000:])),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(timeouts, "SERVER_PAUSES_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 0.5)


def write(folder: Path) -> list[Path]:
    rng = random.Random(0)
    samples = ({"__key__": f"{i:03d}", "bin": rng.randbytes(4_000), "cls": i} for i in range(SHARDS * EACH))
    return write_shards(samples, folder, "s", per_shard=EACH)


def pack(paths: list[Path], folder: Path, kind: str = "gzip") -> list[Path]:
    suffix, compress = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    packed = [folder / f"{path.stem}{suffix}" for path in paths]
    for path, to in zip(paths, packed):
        to.write_bytes(compress(path.read_bytes()))
    return packed


def opened(data: Any, **more: Any) -> Index:
    return Index.open(find_shards(data, DataOptions(cache_dir="cache", **more)), workers=1)


def kept() -> list[str]:
    return sorted(
        path.name
        for path in Path("cache", FOLDER).iterdir()
        if path.suffix not in (".idx", ".TAG") and path.name != ".lock"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_fingerprint_are_those_of_the_plain_shards(kind: str) -> None:
    plain = Index.open(write(Path("plain")))
    packed = opened([str(path) for path in pack([shard.path for shard in plain.shards], Path("packed"), kind)])
    assert packed.fingerprint == plain.fingerprint and packed.counts == [EACH] * SHARDS
    assert samples(packed) == samples(plain)
    assert len(kept()) == SHARDS and not list(Path("packed").glob("*.idx"))
    shutil.rmtree("plain")
    for path in Path("packed").iterdir():
        path.chmod(0)  # which of root stops nothing
    assert samples(opened(f"packed/s-*{KINDS[kind][0]}")) == samples(packed)


def test_what_the_tools_write_is_read() -> None:
    plain = Index.open(write(Path("plain")))
    for tool, suffix in (("gzip", ".gz"), ("bzip2", ".bz2"), ("xz", ".xz")):
        if shutil.which(tool) is None:
            continue
        shutil.copytree("plain", tool, ignore=shutil.ignore_patterns("*.idx"))
        subprocess.run([tool, *(str(path) for path in Path(tool).iterdir())], check=True)
        assert samples(opened(f"{tool}/*.tar{suffix}")) == samples(plain)


def steps(recipe: Any, world: int) -> list[Any]:
    """Two epochs of all ranks."""
    found = []
    for rank in range(world):
        options = DataOptions(workers=0, shuffle_shards=5, shuffle_window=4, cache_dir="cache")
        loader = open_loader(recipe, rank, world, options=options)
        stream = loader.train(0)
        found += [whole(next(stream)) for _ in range(16)]
        stream.close()
        loader.close()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_order_and_bits_are_those_of_the_plain_shards(world: int) -> None:
    """Some are compressed, and some not."""
    paths = write_points(Path("plain"))
    pack(paths[::2], Path("mixed"))
    pack(paths[1::4], Path("mixed"), "xz")
    for path in paths[3::4]:
        shutil.copy(path, "mixed")
    for one, other in zip(steps(Tars("plain/p-*.tar"), world), steps(Tars("mixed/p-*.tar*"), world), strict=True):
        assert one.refs == other.refs
        assert all(torch.equal(one.batches[0][key], other.batches[0][key]) for key in ("x", "y", "mask"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_is_never_a_shorter_shard(kind: str) -> None:
    """At each of many places, one of them between two members."""
    [path] = pack(write(Path("plain"))[:1], Path("packed"), kind)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))  # of the members
    between = [whole.index(b"\x1f\x8b\x08", 2000)] if kind == "members" else []
    for cut in [0, 1, 5, 9, 11, 20, len(whole) // 3, len(whole) // 2, end - 9, end - 8, end - 1, *between]:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"^{path.absolute()}: .*(cut|damaged)") as caught:
            opened(str(path))
        assert "\n" not in str(caught.value) and kept() == []
    for wrong in (whole + b"garbage", whole + whole[:4], whole[: end // 2] + b"?" + whole[end // 2 + 1 :]):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=rf"^{path.absolute()}: can't be unpacked after \d+ bytes"):
            opened(str(path))
        assert kept() == []
    path.write_bytes(whole)
    assert opened(str(path)).counts == [EACH]


BOMBS: dict[str, Callable[[], bytes]] = {
    "members": lambda: gzip.compress(bytes(8 << 20)) * 1000,
    "bzip2": lambda: bz2.compress(bytes(40 << 20)),
    "xz": lambda: lzma.compress(bytes(40 << 20), preset=0),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_fills_neither_disk_nor_memory(kind: str) -> None:
    path = Path(f"a{KINDS[kind][0]}")
    path.write_bytes(BOMBS[kind]())
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (21_000_000, most[1]))
    try:
        with refuses("data.cache_gb=0.02", "GB", "data.cache_gb"):
            opened(str(path), cache_gb=0.02)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert kept() == []
    pieces = unpack((part for part in [(0, BOMBS[kind]())]), "a")
    assert max(len(next(pieces)[1]) for _ in range(4)) <= MOST_AT_ONCE
    pieces.close()


def test_memory_that_a_file_asks_for_is_bounded() -> None:
    """Its header says that its dictionary has 1 GiB."""
    block = bytearray(lzma.compress(bytes(10), preset=0))
    at, end = block.index(b"\x21\x01"), 12 + (block[12] + 1) * 4  # LZMA2 and one byte of properties; of its header
    block[at + 2] = 36
    block[end - 4 : end] = zlib.crc32(block[12 : end - 4]).to_bytes(4, "little")
    Path("a.tar.xz").write_bytes(block)
    with pytest.raises(DataError, match=r"a\.tar\.xz: can't be unpacked after 0 bytes \(Memory usage limit"):
        opened("a.tar.xz")


@pytest.mark.parametrize("name", ["a.tar.zst", "a.tar.lz4", "a.TAR.Z", "a.zip", "http://127.0.0.1/a.tar.zst?x=1"])
def test_what_else_is_compressed_is_refused(name: str) -> None:
    if "://" not in name:
        Path(name).touch()
    with pytest.raises(
        DataError, match=rf"{name.partition('?')[0]}: can't be unpacked; compress it with gzip, .*'pipe:"
    ):
        find_shards(name)


def test_a_file_that_was_written_again_is_another_shard() -> None:
    plain = write(Path("plain"))
    [path] = pack(plain[:1], Path("packed"))
    first = opened(str(path))
    path.write_bytes(gzip.compress(plain[1].read_bytes()))
    again = opened(str(path))
    assert again.fingerprint != first.fingerprint
    assert samples(again) == samples(Index.open(plain[1:2]))
    for remote in (first.shards[0].path, again.shards[0].path):
        remote.drop()
    with pytest.raises(ConfigError, match=r"s-000000\.tar\.gz: changed since it was indexed; .* index --cache-dir "):
        samples(first)
    assert samples(again) == samples(Index.open(plain[1:2])) and len(kept()) == 1


def test_a_file_that_is_written_while_it_is_read_is_refused() -> None:
    plain = write(Path("plain"))
    [path] = pack(plain[:1], Path("packed"))
    found = find_shards(str(path), DataOptions(cache_dir="cache"))
    path.write_bytes(gzip.compress(plain[1].read_bytes()))
    with pytest.raises(ConfigError, match="changed since it was indexed"):
        Index.open(found)
    assert kept() == []


def make(**options: Any) -> Trainer:
    given = Options(max_steps=2, run_dir="runs/r", checkpoint=CheckpointOptions(), **options)
    data = DataOptions(workers=0, shuffle_shards=4, shuffle_window=4, cache_dir="cache")
    return Trainer(Tars("packed/p-*.tar.gz"), batch=12, options=given, data=data, place=Place())


def test_a_resume_on_another_content_is_refused() -> None:
    paths = write_points(Path("plain"))
    pack(paths, Path("packed"))
    make().fit()
    make(resume="auto").fit()
    Path("packed/p-000000.tar.gz").write_bytes(gzip.compress(paths[1].read_bytes()))
    with pytest.raises(
        ConfigError, match=r"^trainer\.resume: data was \w+ in the checkpoint and is \w+; set this back"
    ):
        make(resume="auto")


def test_a_cache_of_little_room_unpacks_again() -> None:
    plain = Index.open(write(Path("plain")))
    packed = pack([shard.path for shard in plain.shards], Path("packed"))
    size = plain.shards[0].bytes
    index = opened([str(path) for path in packed], cache_gb=1.5 * size / 1e9)
    assert len(kept()) == 1
    assert samples(index) * 2 == samples(plain) * 2


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("web")
    with served(folder) as proxy:
        pack(write(folder / "plain"), folder / "www")
        (folder / "www" / "a.tar").write_bytes(b"\x28\xb5\x2f\xfd and so on")
        yield proxy


@needs_nginx
@pytest.mark.parametrize("where", ["", "rangeless/"])
def test_from_a_server_that_cuts(proxy: Proxy, where: str) -> None:
    """It goes on in the middle of a member, or begins anew."""
    proxy.well()
    proxy.cut, proxy.faults = 15_000, 2
    index = opened(f"{proxy.url}/{where}s-{{000000..000003}}.tar.gz")
    assert samples(index) == samples(Index.open(write(Path("plain"))))
    assert index.fingerprint == Index.open(write(Path("other"))).fingerprint
    assert [bool(asked) for _, asked in proxy.requests[:2]] == [False, True]
    assert len(proxy.requests) == SHARDS + (2 if where else 1)  # the rest is less than is cut
    with pytest.raises(DataError, match=rf"^{proxy.url}/a\.tar: can't be unpacked; compress it with gzip"):
        opened(f"{proxy.url}/a.tar")


@pytest.mark.slow
def test_the_tool_takes_them() -> None:
    pack(write(Path("plain")), Path("packed"))
    done = {}
    for command in ("index", "verify", "stat"):
        words = [sys.executable, "-m", "trainer.tools.shards", command, "packed/*.tar.gz", "--cache-dir", "cache"]
        done[command] = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
        assert done[command].returncode == 0, done[command].stderr
    assert done["index"].stdout.count("indexed s-00000") == SHARDS
    assert done["verify"].stdout.count(".tar.gz: as indexed") == SHARDS
    assert f"all: {SHARDS * EACH} samples" in done["stat"].stdout and len(kept()) == SHARDS


def test_empty_streams_cost_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib hands back a copy of what follows a stream: of all that follows, it would be quadratic."""
    copied = 0
    own = Gzip.unused_data.fget
    assert own

    def count(self: Gzip) -> bytes:
        nonlocal copied
        copied += len(found := own(self))
        return found

    monkeypatch.setattr(Gzip, "unused_data", property(count))
    empty = gzip.compress(b"")
    found = b"".join(piece for _, piece in unpack((part for part in [(0, empty * 5000 + gzip.compress(b"x"))]), "a"))
    assert found == b"x" and copied < 60 << 20  # 250 MB if quadratic
