"""Shards at URLs, from a real nginx through a network with faults: all, or an error."""

import hashlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.cli import environment, run
from support.http import Proxy, needs_nginx, served
from support.messages import refuses
from support.shards import EACH, SHARDS, all_of, kept, remote, samples, shard, write

from trainer import timeouts
from trainer.config.options import DataOptions
from trainer.data.remote.eviction import FOLDER, MARKER
from trainer.data.remote.shard import Remote
from trainer.data.sampling.order import Ref, Refs
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.source import Samples
from trainer.errors import ConfigError, DataError, UnavailableError

pytestmark = pytest.mark.usefixtures("quick")


@needs_nginx
def test_samples_are_those_of_the_local_files(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPEN_REWRITE", f"{proxy.url}=/nowhere")
    local = Index.open(find_shards(str(shard(proxy).parent / "s-*.tar")))
    told: list[tuple[str, int, int]] = []
    index = Index.open(remote(tmp_path, all_of(proxy)), lambda *call: told.append(call))
    assert index.fingerprint == local.fingerprint and samples(index) == samples(local)
    assert told == [(f"s-{i:06d}.tar", i + 1, SHARDS) for i in range(SHARDS)]
    names = [hashlib.sha256(f"{proxy.url}/s-{i:06d}.tar".encode()).hexdigest() for i in range(SHARDS)]
    found = sorted(path.name for path in (tmp_path / "cache" / FOLDER).iterdir())
    assert found == sorted([".lock", MARKER, *names, *(f"{name}.idx" for name in names)])
    assert sorted(proxy.paths()) == [f"/s-{i:06d}.tar" for i in range(SHARDS)]
    proxy.well()
    assert samples(Index.open(remote(tmp_path, all_of(proxy)))) == samples(local)
    assert not proxy.requests


def start(proxy: Proxy, home: Path, command: str = "stat") -> "subprocess.Popen[str]":
    """The tool in a process of its own."""
    words = [sys.executable, "-m", "trainer.tools.shards", command, all_of(proxy)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment(HOME=str(home)), stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@needs_nginx
def test_of_three_processes_one_downloads_each_shard(proxy: Proxy, tmp_path: Path) -> None:
    proxy.bytes_per_s = 400_000
    processes = [start(proxy, tmp_path) for _ in range(3)]
    out = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], out
    assert sorted(proxy.paths()) == [f"/s-{i:06d}.tar" for i in range(SHARDS)]
    assert all(f"all: {SHARDS * EACH} samples" in stdout for stdout, _ in out)


@pytest.mark.slow
@needs_nginx
def test_a_kill_during_the_download_leaves_no_shard_and_the_next_start_has_all(proxy: Proxy, tmp_path: Path) -> None:
    proxy.bytes_per_s = 100_000
    cache = tmp_path / ".cache/echelon/shards" / FOLDER
    process = start(proxy, tmp_path)
    deadline = time.monotonic() + 30
    while not any(part.stat().st_size > 30_000 for part in cache.glob(".part-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert list(cache.glob(".part-*")) and not [path for path in cache.iterdir() if len(path.name) == 64]
    proxy.well()
    process = start(proxy, tmp_path)
    assert f"all: {SHARDS * EACH} samples" in process.communicate(timeout=60)[0]
    assert not list(cache.glob(".part-*"))
    for number in range(SHARDS):
        name = hashlib.sha256(f"{proxy.url}/s-{number:06d}.tar".encode()).hexdigest()
        assert (cache / name).read_bytes() == shard(proxy, number).read_bytes()


@needs_nginx
@pytest.mark.slow
@pytest.mark.parametrize("command", ["index", "verify"])
def test_ctrl_c_ends_the_tool_at_once(proxy: Proxy, tmp_path: Path, command: str) -> None:
    """It waits for no shard that is coming, and leaves none that is not whole."""
    if command == "verify":
        for path in find_shards(all_of(proxy)):
            Index.open([path])
            path.drop()
    proxy.bytes_per_s = 10_000
    cache = tmp_path / ".cache/echelon/shards" / FOLDER
    process = start(proxy, tmp_path, command)
    deadline = time.monotonic() + 60
    while not any(part.stat().st_size for part in cache.glob(".part-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=3)
    finally:
        process.kill()
        told = process.communicate()[1]
    assert (process.returncode, told) == (130, "")
    assert not [path for path in cache.iterdir() if len(path.name) == 64]


@needs_nginx
def test_what_is_only_asked_for_ahead_is_not_downloaded(proxy: Proxy, tmp_path: Path) -> None:
    index = Index.open(remote(tmp_path, all_of(proxy)))
    reader, gone = ShardReader(index), index.shards[1].path
    assert isinstance(gone, Remote)
    reader.read(Ref(0, 0, 0))
    gone.drop()
    proxy.well()
    reader.prefetch(Refs([Ref(0, 0, 1), Ref(0, 1, 0)]))
    assert not proxy.requests
    assert reader.read(Ref(0, 1, 0)) and proxy.paths() == ["/s-000001.tar"]
    reader.close()


@needs_nginx
def test_a_server_that_is_away_is_waited_for_where_it_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "web").mkdir()
    with served(tmp_path / "web") as proxy:
        write(tmp_path / "web" / "www")
        index = Index.open(remote(tmp_path, f"{proxy.url}/s-000000.tar"))
        expected = samples(index)
        index.shards[0].path.drop()
        proxy.nginx.kill()
        back = threading.Timer(1.0, proxy.nginx.start)  # five times FIRST_DOWNLOAD_S
        back.start()
        assert samples(index) == expected
        back.join()
        proxy.nginx.kill()
        monkeypatch.setattr(timeouts, "DOWNLOAD_S", 0.2)
        index.shards[0].path.drop()
        source = Samples(ShardReader(index), index.counts, index.fingerprint, None, 0)
        with pytest.raises(
            UnavailableError, match=r"^http.*s-000000\.tar: .*, tried \d+ times in 0 s; check the server"
        ):
            source.batch(Refs([Ref(0, 0, 0)]))  # and no sample is taken for a bad one


def replaced(proxy: Proxy, tmp_path: Path, name: str) -> tuple[Remote, Index]:
    """A shard that nginx has another of, since it was indexed and kept; by its own index."""
    file = shard(proxy).with_name(name.partition("?")[0])
    file.write_bytes(shard(proxy, 1).read_bytes())
    [path] = remote(tmp_path, f"{proxy.url}/{name}")
    first = Index.open([path])
    file.write_bytes(shard(proxy, 2).read_bytes())
    return path, first


@needs_nginx
def test_what_was_indexed_and_is_another_now_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    path, first = replaced(proxy, tmp_path, "changed.tar?versionId=3&of=it")
    assert samples(first) == samples(Index.open([path]))  # what is kept is what was indexed
    path.drop()
    with pytest.raises(ConfigError, match=rf"{proxy.url}/changed\.tar: changed since it was indexed; ") as caught:
        samples(Index.open([path]))
    assert not kept(tmp_path) and not kept(tmp_path, ".part-")
    command = str(caught.value).partition("index it again: echelon ")[2]
    words = shlex.split(command)
    assert command == shlex.join(words) and "&" in command  # a shell splits it likewise
    done = run(words, tmp_path, HOME=str(tmp_path))
    assert done.code == 0, done.err
    again = Index.open([path])
    assert again.fingerprint != first.fingerprint
    assert samples(again) == samples(Index.open([path]))
    assert not (tmp_path / ".cache").exists()


@needs_nginx
def test_index_by_hand_asks_the_server(proxy: Proxy, tmp_path: Path) -> None:
    """Also where what it had before is kept here."""
    path, before = replaced(proxy, tmp_path, "replaced.tar")
    assert Index.open([path]).fingerprint == before.fingerprint and path.file.exists()
    after = Index.open([path], rebuild=True)
    assert after.shards[0].sha256 == Index.open([shard(proxy, 2)]).shards[0].sha256 != before.shards[0].sha256
    assert samples(after) == samples(Index.open([path])) == samples(Index.open([shard(proxy, 2)]))
    shard(proxy).with_name("replaced.tar").unlink()


@needs_nginx
def test_the_way_out_is_short_for_the_default_folder_and_tells_no_signature(proxy: Proxy, tmp_path: Path) -> None:
    [path] = find_shards(f"{proxy.url}/s-000000.tar?sig=s3cr3t", DataOptions())
    with pytest.raises(ConfigError, match=rf"shards index '{proxy.url}/s-000000\.tar\?\*\*\*'$"):
        path._replace(sha256="another").open()


@needs_nginx
def test_damage_in_the_cache_heals_and_at_the_server_is_told(proxy: Proxy, tmp_path: Path) -> None:
    [path] = remote(tmp_path, f"{proxy.url}/s-000000.tar")
    index = Index.open([path])
    expected = samples(index)
    content = bytearray(path.file.read_bytes())
    content[50_000] ^= 1
    path.file.write_bytes(content)
    assert samples(index) == expected and len(proxy.requests) == 2

    cut = shard(proxy).with_name("cut.tar")
    cut.write_bytes(content[:-10240])
    [path] = remote(tmp_path, f"{proxy.url}/cut.tar")
    with pytest.raises(DataError, match=rf"^{proxy.url}/cut\.tar: .* at byte \d+: cut, damaged"):
        Index.open([path])
    cut.write_bytes(shard(proxy).read_bytes())
    assert samples(Index.open([path])) == expected
    cut.unlink()


@pytest.mark.slow
@needs_nginx
def test_the_tool_takes_urls(proxy: Proxy, tmp_path: Path) -> None:
    done = {}
    for command in ("index", "verify", "stat"):
        process = start(proxy, tmp_path, command)
        done[command] = process.communicate(timeout=60)[0]
        assert process.returncode == 0
    assert done["index"].count("indexed s-00000") == SHARDS
    assert done["verify"].count(".tar: as indexed") == SHARDS and f"{proxy.url}/s-000003.tar: {EACH}" in done["stat"]
    assert len(proxy.requests) == SHARDS


def test_a_folder_that_takes_nothing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with refuses("http://127.0.0.1/a.tar", "data.cache_dir", kind=DataError):
        Index.open(remote(tmp_path, "http://127.0.0.1/a.tar"))
