"""Reads all bytes of a shard from a server, a compressed file or a program, or raises an error."""

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

from trainer import timeouts
from trainer.errors import ConfigError, DataError, UnavailableError, printable
from trainer.log import log
from trainer.process.exit import die_with_parent
from trainer.redact import redact_urls

SCHEMES = ("http", "https", "s3", "gs")
PACKAGES = {"s3": "s3fs>=2025.1", "gs": "gcsfs>=2025.1"}
LATER = (408, 425, 429)  # HTTP codes below 500 after which a retry may succeed
CHUNK = 8 << 20
PIPE = 1 << 16  # size of the pipe's buffer

HANDLERS = (
    *(request.ProxyHandler, request.UnknownHandler, request.HTTPHandler, request.HTTPSHandler),
    *(request.HTTPDefaultErrorHandler, request.HTTPRedirectHandler, request.HTTPErrorProcessor),
)  # urllib's own, without ftp, files and data, to which a server could redirect

URL = re.compile(r"(\w[\w+.-]*://)(?:[^\s/?#'\"]*@)?([^\s?#'\"]*)[^\s'\"]*")  # in a command: scheme, host and path
RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:[0-9]+|\*)")  # a header Content-Range


class WrongRange(OSError):
    """A server continues a download at the wrong position."""


class Source(NamedTuple):
    file: Any
    read: Callable[[], bytes]  # returns some of the next bytes, or none at the end
    start: int  # position of the first byte
    size: int | None  # bytes of the whole content, None if unknown
    version: str | None  # identifies the content, such as an ETag


def download(url: str, patience_s: float) -> Generator[tuple[int, bytes]]:
    """Yield all bytes at `url` with their positions, or raise. A position of 0 means a restart.

    Raises:
        DataError: The content does not exist, or may not be read.
        ConfigError: The URL is invalid.
        UnavailableError: The server or the program sent no new byte for `patience_s`.
    """
    scheme = url.partition(":")[0]
    connect = {"http": _by_http, "https": _by_http, "file": _by_file, "pipe": _by_program}.get(scheme, _by_fsspec)
    done, most, version, progress_at = 0, 0, None, time.monotonic()
    reasons: list[str] = []  # of the failures since the last new byte
    while True:
        try:
            source = connect(url, done, version)
            done, version = source.start, source.version
            with contextlib.closing(source.file):
                while done != source.size and (content := source.read()):
                    yield done, content
                    done += len(content)
            if source.size in (None, done):
                return
            reason = f"cut after {done} of {source.size} bytes"
        except DataError:
            raise
        except WrongRange as error:
            version, reason = None, str(error)  # the next try starts from the first byte
        except Exception as error:  # urllib's, botocore's, aiohttp's
            reason = (printable(redact_urls(str(error)[:500])) or type(error).__name__) + _by_proxy(url)
            if isinstance(error, InvalidURL):
                raise ConfigError(
                    f"{shown(url)}: is not a valid URL ({reason}); correct it, with %20 for a space"
                ) from None
            if is_final(error):
                raise DataError(f"{shown(url)}: {reason}; give a shard that exists and may be read") from None
        now = time.monotonic()
        progress_at, most, reasons = (now, done, []) if done > most else (progress_at, most, [*reasons, reason])
        pause_s = timeouts.SERVER_PAUSES_S[min(max(1, len(reasons)), len(timeouts.SERVER_PAUSES_S)) - 1]
        if now + pause_s - progress_at > patience_s:
            cause = "the program" if scheme == "pipe" else "the server and the network"
            tries = f"tried {len(reasons)} times in {now - progress_at:.0f} s"
            why = ", or ".join(dict.fromkeys(reasons[-2:] or [reason]))  # a server may fail in two ways, in turn
            raise UnavailableError(f"{shown(url)}: {why}, {tries}; check {cause}, then resume")
        log.info("%s: %s; trying again", shown(url), reason)
        time.sleep(pause_s)


def _by_http(url: str, done: int, version: str | None) -> Source:
    opener = request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    headers = {"Range": f"bytes={done}-", "If-Range": version} if done and version else {}
    file = opener.open(request.Request(url, headers=headers), timeout=timeouts.SERVER_S)
    start, size = done if file.status == 206 else 0, file.headers["Content-Length"] or ""
    if not size.isdecimal():
        file.close()
        raise OSError(f"the answer has {'an invalid' if size else 'no'} Content-Length")
    if file.status == 206:
        found = RANGE.fullmatch(file.headers["Content-Range"] or "")
        if not found or [int(found[1]), int(found[2]) + 1] != [done, done + int(size)]:
            file.close()
            raise WrongRange("the server sent another range than was asked for")
    version = file.headers["ETag"] or file.headers["Last-Modified"]
    version = None if version and version.startswith("W/") else version  # a weak ETag: the bytes may differ
    return Source(file, lambda: file.read1(CHUNK), start, start + int(size), version)


def _by_proxy(url: str) -> str:
    """Return words that name the proxy, from the environment, through which a URL is requested; "" without one."""
    scheme, _, rest = url.partition("://")
    proxy = request.getproxies().get(scheme) if scheme in ("http", "https") else None
    if not proxy or request.proxy_bypass(rest.partition("/")[0]):
        return ""
    return f", through the proxy {printable(proxy.rpartition('@')[2])} ({scheme}_proxy)"


def _by_fsspec(url: str, done: int, version: str | None) -> Source:
    import fsspec  # its drivers know the protocols, and find the credentials

    scheme = urlsplit(url).scheme
    try:
        files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except ImportError:
        raise DataError(f"{shown(url)}: needs a package; pip install '{PACKAGES[scheme]}'") from None
    about = files.info(url)
    current = about.get("ETag") or about.get("etag")
    file = files.open(url, "rb", cache_type="none", block_size=CHUNK)
    start = done if current and current == version else 0
    file.seek(start)
    return Source(file, lambda: file.read(CHUNK), start, about["size"], current)


def _by_file(url: str, done: int, version: str | None) -> Source:
    path = Path(path_of(url))
    file = path.open("rb", buffering=0)
    about = os.fstat(file.fileno())
    current = f"{about.st_size} {about.st_mtime_ns}"
    start = done if current == version else 0
    file.seek(start)
    return Source(file, lambda: file.read(CHUNK), start, about.st_size, current)


def _by_program(url: str, done: int, version: str | None) -> Source:
    program = Program(url)
    return Source(program, program.read, 0, None, None)


class Program:
    """A program whose output is a shard. It has no shell and no input, and ends no later than this process."""

    def __init__(self, url: str) -> None:
        with contextlib.ExitStack() as stack:
            self.stderr = stack.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                words_of(url), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.stderr, bufsize=0,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 takes no lock of threads
            )  # fmt: skip
            stack.pop_all()

    def read(self) -> bytes:
        assert self.process.stdout
        ready = select.poll()
        ready.register(self.process.stdout, select.POLLIN)
        if not ready.poll(timeouts.SERVER_S * 1000):
            raise TimeoutError(f"no byte for {timeouts.SERVER_S:g} s")
        if content := self.process.stdout.read(PIPE):
            return content
        deadline = time.monotonic() + timeouts.SERVER_S
        while not os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > deadline:
                raise TimeoutError(f"closed its output, but did not end for {timeouts.SERVER_S:g} s")
            time.sleep(0.01)
        if code := self._end():
            raise OSError(f"exit code {code}{self._last()}")
        return b""

    def close(self) -> None:
        assert self.process.stdout
        self._end()
        self.process.stdout.close()
        self.stderr.close()

    def _end(self) -> int:
        """Kill the process group while its id is still reserved, and return the program's exit code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def _last(self) -> str:
        """Return the last line of the program's stderr."""
        self.stderr.seek(max(0, self.stderr.seek(0, os.SEEK_END) - 4096))
        lines = re.split(r"[\r\n]+", self.stderr.read().decode(errors="replace").strip())
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
    """Return the URL without user, password, query and fragment, which may be secret."""
    if url.startswith("pipe:"):
        return URL.sub(r"\1\2", url)
    if url.startswith("file://"):
        return path_of(url)
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
