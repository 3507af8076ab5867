"""Shards at a URL: each is downloaded whole, by one process a node, into a folder that holds so many bytes."""

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urlsplit

from trainer.errors import DataError

SCHEMES = ("http", "https", "s3", "gs")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
TIMEOUT_S = 30.0  # of a server that sends nothing
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before another try, after one that has brought nothing new
LATER = (408, 425, 429)  # the answers below 500 that may be another one soon
CHUNK = 8 << 20
HANDLERS = (
    *(request.ProxyHandler, request.UnknownHandler, request.HTTPHandler, request.HTTPSHandler),
    *(request.HTTPDefaultErrorHandler, request.HTTPRedirectHandler, request.HTTPErrorProcessor),
)  # urllib's own, less those for ftp, files and data, to which a server could send us on

log = logging.getLogger("echelon")


class Remote(NamedTuple):
    """What takes the place of a shard's path."""

    url: str
    file: Path  # where it is kept
    most: int  # bytes that this folder may hold, but for what is in use
    sha256: str = ""  # of what was indexed

    @classmethod
    def kept(cls, url: str, folder: str, gb: float) -> "Remote":
        name = hashlib.sha256(url.encode()).hexdigest()
        return cls(url, Path(folder).expanduser().absolute() / name, int(gb * 1e9))

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name

    def open(self) -> BinaryIO:
        """The whole shard, which stays in the folder until this file is closed.

        Raises:
            DataError: it can't be had, is not what was indexed, or the folder can't take it.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            while (file := self._find() or self._download()) is None:
                time.sleep(0.05)  # another process downloads it
            return file
        except OSError as error:
            raise DataError(
                f"{self}: can't be kept in {self.file.parent} ({error.strerror}); mend that, or give another "
                "data.cache_dir"
            ) from None

    def drop(self) -> None:
        """The next `open` downloads it."""
        self.file.unlink(missing_ok=True)

    def _find(self) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError):
            file = self.file.open("rb", buffering=0)
            fcntl.flock(file, fcntl.LOCK_SH)
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
            return file

    def _download(self) -> BinaryIO | None:
        """None where another process does, or has."""
        part = self.file.with_name(f".part-{self.file.name}")
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b"))
            if not claim(file) or not is_at(file, part):
                return None
            stack.callback(part.unlink, missing_ok=True)
            if self.file.exists():
                return None
            self._fill(file)
            with self.file.with_name(".lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                make_room(self.file.parent, self.most)
                part.replace(self.file)
                fcntl.flock(file, fcntl.LOCK_SH)
            stack.pop_all()
            return file

    def _fill(self, file: BinaryIO) -> None:
        file.truncate(0)  # a process that was killed may have left some
        for start, content in download(self.url):
            if start == 0:
                file.truncate(0)
            file.seek(start)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if self.sha256 and sha256_of(file) != self.sha256:
            raise DataError(
                f"{self}: changed since it was indexed; restore it, or index it again: "
                f"python -m trainer.tools.shards index {self}"
            )


class Source(NamedTuple):
    file: Any
    read: Callable[[], bytes]  # some of the next bytes, none at the end
    start: int  # where they begin
    size: int  # of all
    mark: str | None  # of this content


def download(url: str) -> Iterator[tuple[int, bytes]]:
    """The bytes at `url` with their positions, all or an error. A position of 0 begins anew.

    Raises:
        DataError: for what is not there or not ours, at once; for a server that fails, after some tries.
    """
    reach = _by_http if url.startswith("http") else _by_fsspec
    done, most, failures, mark = 0, 0, 0, None
    while True:
        try:
            source = reach(url, done, mark)
            done, mark = source.start, source.mark
            with contextlib.closing(source.file):
                while done < source.size and (content := source.read()):
                    yield done, content
                    done += len(content)
            if done == source.size:
                return
            reason = f"cut after {done} of {source.size} bytes"
        except DataError:
            raise
        except Exception as error:  # urllib's, botocore's, aiohttp's
            reason = f"{error or type(error).__name__}"
            if is_final(error):
                raise DataError(f"{shown(url)}: {reason}; give what is there, and may be read") from None
        failures = 0 if done > most else failures + 1
        most = max(done, most)
        if failures > len(PAUSES_S):
            raise DataError(f"{shown(url)}: {reason}, tried {failures} times; see to the server or the network")
        log.info("%s: %s; trying again", shown(url), reason)
        time.sleep(PAUSES_S[max(0, failures - 1)])


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
        raise DataError(f"{shown(url)}: needs {PACKAGES[scheme]}; pip install 'echelon-trainer[{scheme}]'") from None
    about = files.info(url)
    found = about.get("ETag") or about.get("etag")
    file = files.open(url, "rb", cache_type="none", block_size=CHUNK)
    start = done if found and found == mark else 0
    file.seek(start)
    return Source(file, lambda: file.read(CHUNK), start, about["size"], found)


def is_final(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return error.code < 500 and error.code not in LATER
    return isinstance(error, FileNotFoundError | PermissionError | ValueError)


def shown(url: str) -> str:
    """Without what may be a password or a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def claim(file: BinaryIO) -> bool:
    """Whether nobody else holds it; the lock ends with the file, or with the process, however that ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def make_room(folder: Path, most: int) -> None:
    """Removes what was used least recently, but not what is open; under the folder's lock."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.suffix not in (".idx", ".tmp") and path.name != ".lock":
                found.append((path.stat().st_atime_ns, path.stat().st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if claim(file):
                path.unlink()
                total -= size
    if total > most:
        log.warning("data.cache_gb=%g: %s holds %g GB, all in use; give it more", most / 1e9, folder, total / 1e9)


def sha256_of(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while content := file.read(1 << 20):
        digest.update(content)
    return digest.hexdigest()
