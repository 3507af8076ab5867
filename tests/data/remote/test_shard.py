"""Shards at URLs, from a real nginx through a network with faults: all, or an error."""

import contextlib
import fcntl
import gzip
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.http import MISSING, NGINX, Proxy, served
from support.shards import EACH, SHARDS, remote, samples, write

import trainer.data.remote.download as fetch_module
import trainer.data.remote.shard as remote_module
import trainer.data.shards.reader as read_module
from trainer.config.options import DataOptions
from trainer.data.remote.shard import Remote
from trainer.data.sampling.order import Ref, walk
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import ConfigError, DataError, UnavailableError

pytestmark = pytest.mark.usefixtures("quick")
needs_nginx = pytest.mark.skipif(NGINX is None, reason=MISSING)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("web")
    with served(folder) as proxy:
        write(folder / "www")
        yield proxy


@pytest.fixture
def proxy(web: Proxy) -> Proxy:
    web.well()
    return web


def shard(proxy: Proxy, number: int = 0) -> Path:
    """Where nginx has it."""
    return proxy.nginx.folder / "www" / f"s-{number:06d}.tar"


def all_of(proxy: Proxy) -> str:
    return f"{proxy.url}/s-{{000000..{SHARDS - 1:06d}}}.tar"


def kept(tmp_path: Path, *hidden: str) -> list[Path]:
    """Whole shards in the cache; with `hidden`, of the files that begin so."""
    every = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".idx"]
    return [path for path in every if path.name.startswith(hidden or tuple("0123456789abcdef"))]


@needs_nginx
def test_samples_are_those_of_the_local_files(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPEN_REWRITE", f"{proxy.url}=/nowhere")
    local = Index.open(find_shards(str(shard(proxy).parent / "s-*.tar")))
    told: list[tuple[str, int, int]] = []
    index = Index.open(remote(tmp_path, all_of(proxy)), lambda *call: told.append(call))
    assert index.fingerprint == local.fingerprint and samples(index) == samples(local)
    assert told == [(f"s-{i:06d}.tar", i + 1, SHARDS) for i in range(SHARDS)]
    names = [hashlib.sha256(f"{proxy.url}/s-{i:06d}.tar".encode()).hexdigest() for i in range(SHARDS)]
    found = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert found == sorted([".lock", *names, *(f"{name}.idx" for name in names)])
    assert sorted(proxy.paths()) == [f"/s-{i:06d}.tar" for i in range(SHARDS)]
    proxy.well()
    assert samples(Index.open(remote(tmp_path, all_of(proxy)))) == samples(local)
    assert not proxy.requests


FAULTS: dict[str, dict[str, Any]] = {
    "cut": {"cut": 100_000, "faults": 5},
    "cut in the header": {"cut": 50, "faults": 3},
    "503": {"answer": "503 Service Unavailable", "faults": 3},
    "429": {"answer": "429 Too Many Requests", "faults": 2},
    "stall": {"stall": 100_000, "faults": 2},
    "slow": {"bytes_per_s": 300_000},
}


@needs_nginx
@pytest.mark.parametrize(
    ("fault", "where"), [*((fault, "") for fault in FAULTS), ("cut", "rangeless/"), ("cut", "moved/")]
)
def test_what_passes_is_tried_again(
    proxy: Proxy, tmp_path: Path, fault: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "TIMEOUT_S", 0.3)
    if where == "rangeless/":
        monkeypatch.setattr(fetch_module, "PAUSES_S", (0.01,) * 6)
    for key, value in FAULTS[fault].items():
        setattr(proxy, key, value)
    [path] = remote(tmp_path, f"{proxy.url}/{where}s-000000.tar")
    Index.open([path])
    assert path.file.read_bytes() == shard(proxy).read_bytes() and kept(tmp_path) == [path.file]
    ranges = [asked for _, asked in proxy.requests]
    if where == "" and fault in ("cut", "stall"):
        assert all(ranges[1:]) and proxy.sent < 1.2 * shard(proxy).stat().st_size + 100_000 * len(ranges)
        starts = [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in ranges[1:]]
        assert starts == sorted(starts) and starts[0] > 50_000


@needs_nginx
def test_bytes_of_two_contents_are_never_mixed(proxy: Proxy, tmp_path: Path) -> None:
    """Replaced while it is downloaded: it is begun anew."""
    (good := shard(proxy).with_name("new.tar")).write_bytes(shard(proxy, 0).read_bytes())
    (other := shard(proxy).with_name("other.tar")).write_bytes(shard(proxy, 1).read_bytes()[:-512])
    proxy.cut, proxy.faults = 100_000, 1
    [path] = remote(tmp_path, f"{proxy.url}/new.tar")
    content = b""
    for start, part in fetch_module.download(path.url, 1.0):
        content = content[:start] + part
        if other.exists():
            other.rename(good)
    assert content == good.read_bytes() and [bool(asked) for _, asked in proxy.requests] == [False, True]
    good.unlink()


@needs_nginx
@pytest.mark.parametrize(
    ("where", "text", "kind"),
    [
        ("none.tar", "HTTP Error 404: Not Found; give", DataError),
        ("private/a.tar", "HTTP Error 403: Forbidden; give", DataError),
        ("s-000000.tar?503", r"HTTP Error 503: .*, tried \d+ times in 0 s; see to", UnavailableError),
        ("s-000000.tar?200", r"an answer without its length, tried \d+ times in 0 s; see to", UnavailableError),
        ("away/s-000000.tar", r"ftp.*, tried \d+ times in 0 s; see to", UnavailableError),
    ],
)
def test_what_can_not_be_had_is_one_line(
    proxy: Proxy, tmp_path: Path, where: str, text: str, kind: type[Exception]
) -> None:
    proxy.answer, proxy.faults = {"200": "200 OK", "503": "503 Service Unavailable"}.get(where[-3:], ""), 99
    [path] = remote(tmp_path, f"{proxy.url}/{where}")
    with pytest.raises(kind, match=rf"^{proxy.url}/{where.partition('?')[0]}: .*{text}") as caught:
        Index.open([path])
    assert "\n" not in str(caught.value) and (len(proxy.requests) > 1) == (kind is UnavailableError)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]


@needs_nginx
def test_what_a_server_says_reaches_no_terminal_as_it_is(proxy: Proxy, tmp_path: Path) -> None:
    proxy.answer, proxy.faults = "404 \x1b[2J\x1b[31mgone", 99
    with pytest.raises(DataError, match=r"s-000000\.tar: HTTP Error 404: \?\[2J\?\[31mgone; give what is there"):
        Index.open(remote(tmp_path, f"{proxy.url}/s-000000.tar"))


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a.tar"
        with pytest.raises(
            UnavailableError, match=r"^http://127.0.0.1:\d+/a.tar: .*, tried \d+ times in 0 s; "
        ) as caught:
            Index.open(remote(tmp_path, url))
    assert "\n" not in str(caught.value)
    assert "secret" not in str(remote(tmp_path, url + "?signature=secret")[0])
    with pytest.raises(
        DataError, match=r"^http://host/a.tar: a URL's user and password are not sent; give one without$"
    ):
        remote(tmp_path, "http://user:secret@host/a.tar")


def test_a_url_that_can_not_be_asked_for_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "FIRST_S", 60.0)
    for url in ("http://127.0.0.1/a b.tar?sig=s3cr3t", "http://127.0.0.1:http/a.tar?sig=s3cr3t"):
        with pytest.raises(
            ConfigError, match=r"^http://127\.0\.0\.1.*: can't be asked for \(.*\); mend the "
        ) as caught:
            Index.open(remote(tmp_path, url))
        assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["ftp://127.0.0.1/a.tar", "gopen:a.tar", "HTTP://127.0.0.1/a.tar", "data:;base64,AAAA"],
)
def test_schemes_beside_the_five_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no such file, and no URL of file, http, https, s3, gs, which alone are"):
        find_shards(name)


def test_urls_expand_braces_alone(tmp_path: Path) -> None:
    found = remote(tmp_path, "s3://bucket/a-{01..03}.tar")
    assert [path.url for path in found] == [f"s3://bucket/a-0{i}.tar" for i in (1, 2, 3)]
    assert [path.name for path in found] == [f"a-0{i}.tar" for i in (1, 2, 3)]
    with pytest.raises(DataError, match=r"a-\*\.tar: can't be listed; write braces"):
        remote(tmp_path, "https://127.0.0.1/a-*.tar")
    (tmp_path / "a.tar").touch()
    assert find_shards(f"file://{tmp_path}/*.tar") == [tmp_path / "a.tar"]


def start(proxy: Proxy, home: Path, command: str = "stat") -> "subprocess.Popen[str]":
    """The tool in a process of its own."""
    words = [sys.executable, "-m", "trainer.tools.shards", command, all_of(proxy)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment(HOME=str(home)), stdout=pipe, stderr=pipe, text=True)


@needs_nginx
def test_of_three_processes_one_downloads_each_shard(proxy: Proxy, tmp_path: Path) -> None:
    proxy.bytes_per_s = 400_000
    processes = [start(proxy, tmp_path) for _ in range(3)]
    out = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], out
    assert sorted(proxy.paths()) == [f"/s-{i:06d}.tar" for i in range(SHARDS)]
    assert all(f"all: {SHARDS * EACH} samples" in stdout for stdout, _ in out)


@needs_nginx
def test_a_kill_during_the_download_leaves_no_shard_and_the_next_start_has_all(proxy: Proxy, tmp_path: Path) -> None:
    proxy.bytes_per_s = 100_000
    cache = tmp_path / ".cache/echelon/shards"
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
@pytest.mark.parametrize("command", ["index", "verify"])
def test_ctrl_c_ends_the_tool_at_once(proxy: Proxy, tmp_path: Path, command: str) -> None:
    """It waits for no shard that is coming, and leaves none that is not whole."""
    if command == "verify":
        for path in find_shards(all_of(proxy)):
            Index.open([path])
            path.drop()
    proxy.bytes_per_s = 10_000
    cache = tmp_path / ".cache/echelon/shards"
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
        patch.setattr(read_module, "IDLE_S", 0.0)
        reader, most = ShardReader(index), 0
        found = []
        for ref in [*walk(index.counts, 0, 1)] * 2:
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
            assert "all in use; give it more" in caplog.text
        finally:
            other.kill()
    paths[2].open().close()
    assert kept(tmp_path) == [paths[2].file]


@needs_nginx
def test_what_is_only_asked_for_ahead_is_not_downloaded(proxy: Proxy, tmp_path: Path) -> None:
    index = Index.open(remote(tmp_path, all_of(proxy)))
    reader, gone = ShardReader(index), index.shards[1].path
    assert isinstance(gone, Remote)
    reader.read(Ref(0, 0, 0))
    gone.drop()
    proxy.well()
    reader.prefetch([Ref(0, 0, 1), Ref(0, 1, 0)])
    assert not proxy.requests
    assert reader.read(Ref(0, 1, 0)) and proxy.paths() == ["/s-000001.tar"]
    reader.close()


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
    (tmp_path / "cache").mkdir(exist_ok=True)

    def look() -> None:
        while not done.wait(0.002):
            with (tmp_path / "cache" / ".lock").open("wb") as lock:
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
    with pytest.raises(DataError, match="no room for it yet"):
        index.shards[0].path.fetch()
    assert sorted(kept(tmp_path)) == sorted(path.file for path in paths[2:]) and not proxy.requests
    monkeypatch.setattr(remote_module, "SPARE_S", 0.0)
    index.shards[0].path.fetch()
    assert sorted(kept(tmp_path)) == sorted([paths[0].file, paths[3].file])


@needs_nginx
def test_a_shard_that_is_larger_than_the_folder_may_be_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    size = shard(proxy).stat().st_size
    told = (
        rf"^data\.cache_gb=0\.0001: {proxy.url}/s-000000\.tar alone has {{}} GB; give it more, or write smaller shards$"
    )
    with pytest.raises(ConfigError, match=told.format(r"0\.000\d+")):
        Index.open(remote(tmp_path, all_of(proxy), cache_gb=1e-4))
    Index.open(remote(tmp_path, all_of(proxy)))
    proxy.well()
    with pytest.raises(ConfigError, match=told.format(re.escape(f"{size / 1e9:g}"))):
        Index.open(remote(tmp_path, all_of(proxy), cache_gb=1e-4))
    assert not proxy.requests


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
        back = threading.Timer(1.0, proxy.nginx.start)  # five times FIRST_S
        back.start()
        assert samples(index) == expected
        back.join()
        proxy.nginx.kill()
        monkeypatch.setattr(remote_module, "PATIENCE_S", 0.2)
        index.shards[0].path.drop()
        source = Samples(ShardReader(index), index.counts, index.fingerprint, None, 0)
        with pytest.raises(UnavailableError, match=r"^http.*s-000000\.tar: .*, tried \d+ times in 0 s; see to"):
            source.batch([Ref(0, 0, 0)])  # and no sample is taken for a bad one


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
    command = str(caught.value).partition("index it again: python ")[2]
    done = subprocess.run(
        f"{sys.executable} {command}", shell=True, env=environment(HOME=str(tmp_path)), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    again = Index.open([path])
    assert again.fingerprint != first.fingerprint
    assert samples(again) == samples(Index.open([path]))
    assert not (tmp_path / ".cache").exists()


@needs_nginx
def test_index_by_hand_asks_the_server(proxy: Proxy, tmp_path: Path) -> None:
    """Also where what it had before is kept here."""
    path, before = replaced(proxy, tmp_path, "replaced.tar")
    assert Index.open([path]).fingerprint == before.fingerprint and path.file.exists()
    after = Index.open([path], anew=True)
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
    with pytest.raises(DataError, match=r"a\.tar: can't be kept in .*cache \(.*\); .* another data\.cache_dir$"):
        Index.open(remote(tmp_path, "http://127.0.0.1/a.tar"))


@pytest.fixture
def packed(tmp_path: Path) -> Remote:
    """A compressed shard, and the folder for it."""
    write_shards([{"__key__": str(i), "cls": i} for i in range(4)], tmp_path, "a", 4)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress((tmp_path / "a-000000.tar").read_bytes()))
    (tmp_path / "cache").mkdir()
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
        with pytest.raises(DataError, match=r"can't be kept in .*/cache \(") as refused:
            packed.open()
    finally:
        signal.alarm(0)
    assert "\n" not in str(refused.value)
    assert victim.read_text() == "precious" * 100
