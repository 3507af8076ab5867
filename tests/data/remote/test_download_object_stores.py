"""Shards of object stores, from a real S3 server, and from Google's emulator where that is installed."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.shards import SHARDS, remote, samples, write

from trainer.data.shards.index import Index
from trainer.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("quick")

S3 = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system of fsspec's on a server of its own, with a bucket."""
    s3fs, _ = pytest.importorskip("s3fs"), pytest.importorskip("moto")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", S3], stdin=pipe, stdout=pipe, text=True, env=environment()) as server:
        try:
            assert server.stdout
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{int(server.stdout.readline())}")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
            files.mkdir("bucket")
            yield files
        finally:
            server.kill()


@pytest.mark.slow
def test_samples_from_s3(bucket: Any, tmp_path: Path) -> None:
    paths = write(tmp_path / "local")
    for path in paths:
        bucket.put_file(str(path), f"bucket/folder/{path.name}")
    local = Index.open(paths)
    index = Index.open(remote(tmp_path, f"s3://bucket/folder/s-{{000000..{SHARDS - 1:06d}}}.tar"))
    assert index.fingerprint == local.fingerprint and samples(index) == samples(local)
    (packed := tmp_path / "a.tar.gz").write_bytes(gzip.compress(paths[2].read_bytes()))
    bucket.put_file(str(packed), "bucket/folder/a.tar.gz")
    assert samples(Index.open(remote(tmp_path, "s3://bucket/folder/a.tar.gz"))) == samples(Index.open(paths[2:3]))
    for url, text in (("s3://bucket/none.tar", "none.tar"), ("s3://nobodys/a.tar", "")):
        with pytest.raises(DataError, match=rf"^{url}: .*{text}.*; give a shard that exists") as caught:
            Index.open(remote(tmp_path, url))
        assert "\n" not in str(caught.value)
    bucket.put_file(str(paths[1]), f"bucket/folder/{paths[0].name}")
    index.shards[0].path.drop()
    with pytest.raises(ConfigError, match="changed since it was indexed"):
        samples(index)


GS = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print(server._api._httpd.server_address[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As `bucket`, with Google's protocol."""
    gcsfs = pytest.importorskip("gcsfs", reason="needs gcsfs and gcp-storage-emulator: pip install them")
    pytest.importorskip("gcp_storage_emulator", reason="needs gcp-storage-emulator: pip install it")
    words, null, pipe = [sys.executable, "-c", GS], subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=null, text=True, env=environment()) as server:
        try:
            assert server.stdout
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{int(server.stdout.readline())}")
            yield gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
        finally:
            server.kill()


def test_samples_from_gs(google: Any, tmp_path: Path) -> None:
    paths = write(tmp_path / "local")
    for path in paths:
        google.pipe_file(f"bucket/folder/{path.name}", path.read_bytes())
    local = Index.open(paths)
    index = Index.open(remote(tmp_path, f"gs://bucket/folder/s-{{000000..{SHARDS - 1:06d}}}.tar"))
    assert index.fingerprint == local.fingerprint and samples(index) == samples(local)
    for url in ("gs://bucket/none.tar", "gs://nobodys/a.tar"):
        with pytest.raises(DataError, match=rf"^{url}: .*; give a shard that exists") as caught:
            Index.open(remote(tmp_path, url))
        assert "\n" not in str(caught.value)
    google.pipe_file(f"bucket/folder/{paths[0].name}", paths[1].read_bytes())
    index.shards[0].path.drop()
    with pytest.raises(ConfigError, match="changed since it was indexed"):
        samples(index)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_without_its_package_a_scheme_is_one_line(
    tmp_path: Path, scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, scheme, raising=False)
    with pytest.raises(DataError, match=rf"//b/a\.tar: needs a package; pip install '{package}>=2025\.1'$"):
        Index.open(remote(tmp_path, f"{scheme}://b/a.tar"))
