"""The shards that a recipe names: files, patterns and URLs; each shard once, in order, and nothing else."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from support.messages import refuses
from support.shards import remote
from support.tars import numbered, write_tar

from trainer.config.options import DataOptions
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("home")


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


def test_a_folder_may_be_called_like_a_pattern(tmp_path: Path) -> None:
    (folder := tmp_path / "[2024] a*").mkdir()
    (shard := folder / "train-0.tar").touch()
    assert find_shards(f"{folder}/train-*.tar") == [shard]
    assert find_shards("[2024] a*/**/train-?.tar") == [shard.relative_to(tmp_path)]


@pytest.mark.parametrize(
    "name",
    ["ftp://127.0.0.1/a.tar", "gopen:a.tar", "data:;base64,AAAA"],
)
def test_schemes_beside_the_five_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match=r"no such file, and no URL of a known scheme; give file, http, https, s3, gs or"
    ):
        find_shards(name)


def test_urls_expand_braces_alone(tmp_path: Path) -> None:
    found = remote(tmp_path, "s3://bucket/a-{01..03}.tar")
    assert [path.url for path in found] == [f"s3://bucket/a-0{i}.tar" for i in (1, 2, 3)]
    assert [path.name for path in found] == [f"a-0{i}.tar" for i in (1, 2, 3)]
    with refuses("https://127.0.0.1/a-*.tar", "{000..009}", kind=DataError):
        remote(tmp_path, "https://127.0.0.1/a-*.tar")
    (tmp_path / "a.tar").touch()
    assert find_shards(f"file://{tmp_path}/*.tar") == [tmp_path / "a.tar"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_shard_may_be_named_tar(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    content = write_tar(tmp_path / "plain.tar", numbered(4)).read_bytes()
    (tmp_path / "a.tar").write_bytes(pack(content))
    for _ in range(2):
        index = Index.open(find_shards(str(tmp_path / "a.tar"), DataOptions(cache_dir=str(tmp_path / "cache"))))
        assert index.counts == [4]


@pytest.mark.parametrize("url", ["http://[::1/x.tar", "http://h:99999/x.tar", "https:///x.tar", "http://h:-1/x.tar"])
def test_a_url_that_no_server_can_have_is_refused_at_once(url: str) -> None:
    """Not after the patience for a server that is away."""
    with pytest.raises(ConfigError, match=r": is not a valid URL \(.*\); correct it"):
        find_shards(url)


@pytest.mark.parametrize("braces", ["{0..999999999}", "{0..99}{0..99}", "{a,b}" * 30, "{999999999..0..2}"])
def test_braces_that_mean_too_many_names_are_refused_at_once(braces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.shards.discover.MOST", 1000)
    with pytest.raises(DataError, match="its braces mean more than 1,000 names"):
        find_shards(f"http://h/{braces}.tar")
    assert len(find_shards("http://h/{a-{0..9999..20},b-{1..500}}.tar")) == 1000


def test_a_scheme_has_no_case() -> None:
    assert find_shards("HTTP://h/A.tar") == find_shards("http://h/A.tar")
