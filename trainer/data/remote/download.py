"""The bytes of a shard from where it is: a server, a compressed file, a program. Whole, or an error."""

import contextlib
import functools
import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from http.client import InvalidURL
from pathlib import Path
from typing import Any, NamedTuple
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urlsplit

from trainer.config.redact import redact_urls
from trainer.errors import ConfigError, DataError, UnavailableError, printable
from trainer.log import log
from trainer.process.exit import die_with_parent

SCHEMES = ("http", "https", "s3", "gs")
PACKAGES = {"s3": "s3fs>=2025.1", "gs": "gcsfs>=2025.1"}
TIMEOUT_S = 30.0  # of a server or a program that sends nothing
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before another try, after one that has brought nothing new
LATER = (408, 425, 429)  # the answers below 500 that may be another one soon
CHUNK = 8 << 20
PIPE = 1 << 16  # what the system keeps of a program's output

HANDLERS = (
    *(request.ProxyHandler, request.UnknownHandler, request.HTTPHandler, request.HTTPSHandler),
    *(request.HTTPDefaultErrorHandler, request.HTTPRedirectHandler, request.HTTPErrorProcessor),
)  # urllib's own, less those for ftp, files and data, to which a server could send us on

URL = re.compile(r"(\w[\w+.-]*://)(?:[^\s/?#'\"]*@)?([^\s?#'\"]*)[^\s'\"]*")  # in a command: scheme, host and path


class Source(NamedTuple):
    file: Any
    read: Callable[[], bytes]  # some of the next bytes, none at the end
    start: int  # where they begin
    size: int | None  # of all; None where only the end tells
    mark: str | None  # of this content


def download(url: str, patience_s: float) -> Generator[tuple[int, bytes]]:
    """Yield all bytes at `url` with their positions, or raise. A position of 0 begins anew.

    Raises:
        DataError, ConfigError: for what is not there or not ours, and for what is no URL, at once.
        UnavailableError: for a server or a program that gave nothing new for `patience_s`.
    """
    scheme = url.partition(":")[0]
    reach = {"http": _by_http, "https": _by_http, "file": _by_file, "pipe": _by_program}.get(scheme, _by_fsspec)
    done, most, failures, mark, heard = 0, 0, 0, None, time.monotonic()
    while True:
        try:
            source = reach(url, done, mark)
            done, mark = source.start, source.mark
            with contextlib.closing(source.file):
                while done != source.size and (content := source.read()):
                    yield done, content
                    done += len(content)
            if source.size in (None, done):
                return
            reason = f"cut after {done} of {source.size} bytes"
        except DataError:
            raise
        except Exception as error:  # urllib's, botocore's, aiohttp's
            reason = printable(redact_urls(str(error)[:500])) or type(error).__name__
            if isinstance(error, InvalidURL):
                raise ConfigError(
                    f"{shown(url)}: can't be asked for ({reason}); mend the URL: a space is %20"
                ) from None
            if is_final(error):
                raise DataError(f"{shown(url)}: {reason}; give what is there, and may be read") from None
        now = time.monotonic()
        failures, heard, most = (0, now, done) if done > most else (failures + 1, heard, most)
        pause_s = PAUSES_S[min(max(1, failures), len(PAUSES_S)) - 1]
        if now + pause_s - heard > patience_s:
            way = "the program" if scheme == "pipe" else "the server or the network"
            told = f"tried {failures} times in {now - heard:.0f} s; see to {way}"
            raise UnavailableError(f"{shown(url)}: {reason}, {told}")
        log.info("%s: %s; trying again", shown(url), reason)
        time.sleep(pause_s)


def _by_http(url: str, done: int, mark: str | None) -> Source:
    opener = request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    rest = {"Range": f"bytes={done}-", "If-Range": mark} if done and mark else {}
    file = opener.open(request.Request(url, headers=rest), timeout=TIMEOUT_S)
    start, size = done if file.status == 206 else 0, file.headers["Content-Length"]
    if size is None:
        raise OSError("an answer without its length")
    mark = file.headers["ETag"] or file.headers["Last-Modified"]
    mark = None if mark and mark.startswith("W/") else mark  # of content that is alike, not the same
    return Source(file, lambda: file.read1(CHUNK), start, start + int(size), mark)


def _by_fsspec(url: str, done: int, mark: str | None) -> Source:
    """Whose drivers know the protocols and find the credentials."""
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except ImportError:
        raise DataError(f"{shown(url)}: needs a package; pip install '{PACKAGES[scheme]}'") from None
    about = files.info(url)
    found = about.get("ETag") or about.get("etag")
    file = files.open(url, "rb", cache_type="none", block_size=CHUNK)
    start = done if found and found == mark else 0
    file.seek(start)
    return Source(file, lambda: file.read(CHUNK), start, about["size"], found)


def _by_file(url: str, done: int, mark: str | None) -> Source:
    path = Path(path_of(url))
    file = path.open("rb", buffering=0)
    about = os.fstat(file.fileno())
    found = f"{about.st_size} {about.st_mtime_ns}"
    start = done if found == mark else 0
    file.seek(start)
    return Source(file, lambda: file.read(CHUNK), start, about.st_size, found)


def _by_program(url: str, done: int, mark: str | None) -> Source:
    program = Program(url)
    return Source(program, program.read, 0, None, None)


class Program:
    """A program whose output is a shard: without a shell or input, ended with this process at the latest."""

    def __init__(self, url: str) -> None:
        with contextlib.ExitStack() as stack:
            self.said = stack.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                words_of(url), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.said, bufsize=0,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 takes no lock of threads
            )  # fmt: skip
            stack.pop_all()

    def read(self) -> bytes:
        """Read the program's next bytes.

        Raises:
            OSError: no byte came in time, or after the last it failed.
        """
        assert self.process.stdout
        ready = select.poll()
        ready.register(self.process.stdout, select.POLLIN)
        if not ready.poll(TIMEOUT_S * 1000):
            raise TimeoutError(f"no byte for {TIMEOUT_S:g} s")
        if content := self.process.stdout.read(PIPE):
            return content
        deadline = time.monotonic() + TIMEOUT_S
        while not os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > deadline:
                raise TimeoutError(f"has closed its output, and not ended for {TIMEOUT_S:g} s")
            time.sleep(0.01)
        if code := self._end():
            raise OSError(f"exit code {code}{self._last()}")
        return b""

    def close(self) -> None:
        assert self.process.stdout
        self._end()
        self.process.stdout.close()
        self.said.close()

    def _end(self) -> int:
        """Return the exit code. Kill the rest of its group first, before its number may be another's."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def _last(self) -> str:
        """Return the program's last line."""
        self.said.seek(max(0, self.said.seek(0, os.SEEK_END) - 4096))
        lines = re.split(r"[\r\n]+", self.said.read().decode(errors="replace").strip())
        line = URL.sub(r"\1\2", printable(lines[-1][-200:]))
        return f" ({line})" if line else ""


def words_of(url: str) -> list[str]:
    return shlex.split(url.removeprefix("pipe:"))


def path_of(url: str) -> str:
    return url.removeprefix("file://")


def is_final(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return error.code < 500 and error.code not in LATER
    return isinstance(error, FileNotFoundError | PermissionError | ValueError)


def shown(url: str) -> str:
    """Without what may be a password or a signature."""
    if url.startswith("pipe:"):
        return URL.sub(r"\1\2", url)
    if url.startswith("file://"):
        return path_of(url)
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
