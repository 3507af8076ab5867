"""Downloads from a real nginx through a network with faults: all bytes of one content, or an error in one line."""

from pathlib import Path
from typing import Any

import pytest
from support.http import Proxy, needs_nginx
from support.messages import refuses
from support.shards import kept, remote, shard

import trainer.data.remote.download as fetch_module
from trainer import timeouts
from trainer.data.remote.eviction import FOLDER, MARKER
from trainer.data.shards.index import Index
from trainer.errors import ConfigError, DataError, UnavailableError

pytestmark = pytest.mark.usefixtures("quick")


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
    monkeypatch.setattr(timeouts, "SERVER_S", 0.3)
    if where == "rangeless/":
        monkeypatch.setattr(timeouts, "SERVER_PAUSES_S", (0.01,) * 6)
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
        ("s-000000.tar?503", r"HTTP Error 503: .*, tried \d+ times in 0 s; check the server", UnavailableError),
        (
            "s-000000.tar?200",
            r"the answer has no Content-Length, tried \d+ times in 0 s; check the server",
            UnavailableError,
        ),
        ("away/s-000000.tar", r"ftp.*, tried \d+ times in 0 s; check the server", UnavailableError),
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
    assert {entry.name for entry in (tmp_path / "cache" / FOLDER).iterdir()} == {".lock", MARKER}


@needs_nginx
def test_what_a_server_says_reaches_no_terminal_as_it_is(proxy: Proxy, tmp_path: Path) -> None:
    proxy.answer, proxy.faults = "404 \x1b[2J\x1b[31mgone", 99
    with pytest.raises(DataError, match=r"s-000000\.tar: HTTP Error 404: \?\[2J\?\[31mgone; give a shard that exists"):
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
    with refuses("http://host/a.tar", "URL", "URL", kind=DataError):
        remote(tmp_path, "http://user:secret@host/a.tar")


def test_a_proxy_that_is_not_there_is_named_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", f"http://bob:s3cr3t@{host}")
        with pytest.raises(UnavailableError, match=rf", through the proxy {host} \(http_proxy\), tried") as caught:
            Index.open(remote(tmp_path, "http://store.invalid/a.tar"))
        assert "s3cr3t" not in str(caught.value)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(UnavailableError, match="Connection refused>, tried"):
            Index.open(remote(tmp_path, f"http://{host}/a.tar"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:abc")
    with refuses("http://store.invalid/a.tar", "URL", "//127.0.0.1", "http_proxy"):
        Index.open(remote(tmp_path, "http://store.invalid/a.tar"))


def test_a_url_that_can_not_be_asked_for_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 60.0)
    for url in ("http://127.0.0.1/a b.tar?sig=s3cr3t", "http://127.0.0.1:http/a.tar?sig=s3cr3t"):
        with pytest.raises(
            ConfigError, match=r"^http://127\.0\.0\.1.*: is not a valid URL \(.*\); correct it"
        ) as caught:
            Index.open(remote(tmp_path, url))
        assert "s3cr3t" not in str(caught.value)
