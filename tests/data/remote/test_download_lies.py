"""A server that answers with something else: the shard is downloaded once more, then refused by one line."""

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shards import EACH, samples, write

from trainer import timeouts
from trainer.config.options import DataOptions
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.errors import ConfigError, DataError, UnavailableError

Answer = Callable[[Any, bytes, int], None]  # of a handler, the shard's bytes, and the first byte that is asked for
PAGE = b"<html>please log in</html>"


def send(handler: Any, code: int, content: bytes, length: object = None, **headers: str) -> None:
    handler.send_response(code)
    for name, value in {"Content-Length": len(content) if length is None else length, "ETag": '"x"', **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(content)
    handler.close_connection = True


def cut_then(lie: Answer) -> Answer:
    """A lie about the rest of a download."""
    return lambda handler, shard, start: (
        lie(handler, shard, start) if start else send(handler, 200, shard[:5000], len(shard))
    )


def ranged(first: int, text: str = "bytes {}-{}/*") -> Answer:
    """Bytes from `first` on, under the status of a range, with a header that says so."""

    def answer(handler: Any, shard: bytes, start: int) -> None:
        content = shard[first : first + len(shard) - start]
        send(handler, 206, content, Content_Range=text.format(first, first + len(content) - 1))

    return cut_then(answer)


def flipped(handler: Any, shard: bytes, start: int) -> None:
    send(handler, 200, shard[:1300] + bytes([shard[1300] ^ 1]) + shard[1301:])


LIES: dict[str, Answer] = {
    "range from the start": ranged(0),
    "range from elsewhere": ranged(4000),
    "no Content-Range": ranged(0, ""),
    "a range without an end": ranged(5000, "bytes {}"),
    "page": lambda handler, shard, start: send(handler, 200, PAGE),
    "flip": flipped,
    "negative length": lambda handler, shard, start: send(handler, 200, shard, -5),
    "length is no number": lambda handler, shard, start: send(handler, 200, shard, "many"),
}


@pytest.fixture
def liar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of one folder whose `lies` are answers, the next one first."""
    monkeypatch.setattr(timeouts, "SERVER_PAUSES_S", (0.01,))
    monkeypatch.setenv("no_proxy", "*")
    write(tmp_path / "www")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            shard = (tmp_path / "www" / Path(self.path).name).read_bytes()
            start = int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])
            server.asked.append(start)
            lie = server.lies.pop(0) if server.lies else None
            lie(self, shard, start) if lie else send(self, 200, shard)

    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.lies, server.asked = [], []
    server.data, server.folder = f"http://127.0.0.1:{server.server_port}/s-000000.tar", tmp_path
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def opened(server: Any) -> Index:
    return Index.open(find_shards(server.data, DataOptions(cache_dir=str(server.folder / "cache"))), workers=1)


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("indexed", [False, True])
def test_one_lie_costs_one_more_download(liar: Any, name: str, indexed: bool) -> None:
    """From byte 0. Without an index, a flipped bit of a value can't be known."""
    local = samples(Index.open([liar.folder / "www" / "s-000000.tar"]))
    if indexed:
        opened(liar).shards[0].path.drop()
        liar.asked.clear()
    liar.lies = [LIES[name]] * (2 if "range" in name or "Range" in name else 1)
    index = opened(liar)
    found = samples(index)
    assert len(found) == EACH and liar.asked[0] == 0 == liar.asked[-1] and len(liar.asked) <= 3
    if indexed or name != "flip":
        assert [sample["bin"] for sample in found] == [sample["bin"] for sample in local]


@pytest.mark.parametrize(
    ("name", "indexed", "kind", "told"),
    [
        ("page", False, DataError, "s-000000.tar"),
        ("page", True, ConfigError, "s-000000.tar: changed since it was indexed; restore it, or index it again: "),
        ("flip", True, ConfigError, "s-000000.tar: changed since it was indexed; restore it, or index it again: "),
        ("range from the start", False, UnavailableError, "the server sent another range than was asked for"),
    ],
)
def test_a_server_that_goes_on_lying_is_one_line(
    liar: Any, name: str, indexed: bool, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if indexed:
        opened(liar).shards[0].path.drop()
    liar.asked.clear()
    liar.lies = [LIES[name]] * 1000
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 0.2)
    with pytest.raises(kind) as caught:
        samples(opened(liar))
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert "range" in name or len(liar.asked) == 2
