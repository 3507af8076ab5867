"""The folder of shards keeps its bound: what is in use stays, and a neighbour's links and pipes are refused."""

import contextlib
import fcntl
import gzip
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cli import environment
from support.http import Proxy, needs_nginx
from support.shards import all_of, kept, remote, samples, shard, whole_walk

from trainer import timeouts
from trainer.data.remote.eviction import FOLDER, make_folder
from trainer.data.remote.shard import Remote
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("quick")


@needs_nginx
def test_the_cache_is_bounded_and_what_was_used_least_recently_goes(proxy: Proxy, tmp_path: Path) -> None:
    size = shard(proxy).stat().st_size
    paths = remote(tmp_path, all_of(proxy), cache_gb=2.5 * size / 1e9)
    local = Index.open(find_shards(str(shard(proxy).parent / "s-*.tar")))
    index = Index.open(paths, workers=1)
    assert sorted(kept(tmp_path)) == sorted(path.file for path in paths[2:])
    index.shards[2].path.open().close()
    proxy.well()
    index.shards[0].path.open().close()
    assert sorted(kept(tmp_path)) == sorted([paths[0].file, paths[2].file]) and proxy.paths() == ["/s-000000.tar"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "IDLE_S", 0.0)
        reader, most = ShardReader(index), 0
        found = []
        for ref in [*whole_walk(index.counts)] * 2:
            found.append(reader.read(ref))
            most = max(most, sum(path.stat().st_size for path in kept(tmp_path)))
        reader.close()
    assert found == samples(local) * 2 and size < most <= 2.5 * size


@needs_nginx
def test_a_shard_in_use_stays(proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By another process as well, until that ends, however it does."""
    size = shard(proxy).stat().st_size
    paths = remote(tmp_path, all_of(proxy), cache_gb=1.5 * size / 1e9)
    paths[0].open().close()
    code = "import sys, time; from pathlib import Path; from trainer.data.remote.shard import Remote\n"
    code += "file = Remote(sys.argv[1], Path(sys.argv[2]), 1).open(); print('open', flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code, paths[0].url, str(paths[0].file)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout and other.stdout.readline() == b"open\n"
            paths[1].open().close()
            assert sorted(kept(tmp_path)) == sorted([paths[0].file, paths[1].file])
            assert "all in use; raise data.cache_gb" in caplog.text
        finally:
            other.kill()
    paths[2].open().close()
    assert kept(tmp_path) == [paths[2].file]


@needs_nginx
def test_room_is_made_before_a_shard_comes(proxy: Proxy, tmp_path: Path) -> None:
    """Also for those that come at the same time; and where nobody knows how large one is, as its bytes come."""
    size = shard(proxy).stat().st_size
    proxy.bytes_per_s = 1_000_000
    most, paths = 2.5 * size, remote(tmp_path, all_of(proxy), cache_gb=2.5 * size / 1e9)
    with watched(tmp_path) as held:
        index = Index.open(paths, workers=1)
    assert max(held) <= most and len(set(held)) > 20
    assert sorted(kept(tmp_path)) == sorted(path.file for path in paths[2:])
    with watched(tmp_path) as held, ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(index.shards[number].path.open) for number in (0, 1)]
        while len(kept(tmp_path, ".part-")) < 2 or kept(tmp_path):
            assert not any(each.done() for each in coming)
        for each in coming:
            each.result().close()
    assert max(held) <= most and sorted(kept(tmp_path)) == sorted(path.file for path in paths[:2])


@contextlib.contextmanager
def watched(tmp_path: Path) -> Iterator[list[int]]:
    """What the folder holds, again and again; parts with what they will have."""
    found, done = list[int](), threading.Event()
    make_folder(tmp_path / "cache" / FOLDER)

    def look() -> None:
        while not done.wait(0.002):
            with (tmp_path / "cache" / FOLDER / ".lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found.append(sum(path.stat().st_size for path in kept(tmp_path, ".part-", *"0123456789abcdef")))

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    done.set()
    thread.join()


@needs_nginx
def test_what_nobody_waits_for_pushes_out_nothing_that_was_just_used(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = remote(tmp_path, all_of(proxy), cache_gb=2.5 * shard(proxy).stat().st_size / 1e9)
    index = Index.open(paths, workers=1)
    proxy.well()
    with pytest.raises(DataError, match="no room for this shard yet"):
        index.shards[0].path.fetch()
    assert sorted(kept(tmp_path)) == sorted(path.file for path in paths[2:]) and not proxy.requests
    monkeypatch.setattr(timeouts, "SPARE_S", 0.0)
    index.shards[0].path.fetch()
    assert sorted(kept(tmp_path)) == sorted([paths[0].file, paths[3].file])


@needs_nginx
def test_a_shard_that_is_larger_than_the_folder_may_be_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    size = shard(proxy).stat().st_size
    told = (
        rf"^data\.cache_gb=0\.0001: {proxy.url}/s-000000\.tar alone has {{}} GB; raise data.cache_gb, "
        "or write smaller shards$"
    )
    with pytest.raises(ConfigError, match=told.format(r"0\.000\d+")):
        Index.open(remote(tmp_path, all_of(proxy), cache_gb=1e-4))
    Index.open(remote(tmp_path, all_of(proxy)))
    proxy.well()
    with pytest.raises(ConfigError, match=told.format(re.escape(f"{size / 1e9:g}"))):
        Index.open(remote(tmp_path, all_of(proxy), cache_gb=1e-4))
    assert not proxy.requests


@pytest.fixture
def packed(tmp_path: Path) -> Remote:
    """A compressed shard, and the folder for it."""
    write_shards([{"__key__": str(i), "cls": i} for i in range(4)], tmp_path, "a", 4)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress((tmp_path / "a-000000.tar").read_bytes()))
    make_folder(tmp_path / "cache" / FOLDER)
    return Remote.kept(f"file://{path}", str(tmp_path / "cache"), 1.0)


@pytest.mark.parametrize("name", [".lock", ".part-{}", "{}"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_neighbour_in_the_folder_can_not_have_files_written_or_the_run_wait(
    packed: Remote, name: str, kind: str, tmp_path: Path
) -> None:
    """Whoever may write to it puts a link to a file of ours in place of one of the folder's, or a pipe."""
    victim, trap = tmp_path / "victim", packed.file.with_name(name.format(packed.file.name))
    victim.write_text("precious" * 100)
    if kind == "link":
        trap.symlink_to(victim)
    else:
        os.mkfifo(trap)
    signal.alarm(20)
    try:
        with pytest.raises(DataError, match=r"can't be kept in .*/cache/echelon-shards \(") as refused:
            packed.open()
    finally:
        signal.alarm(0)
    assert "\n" not in str(refused.value)
    assert victim.read_text() == "precious" * 100
