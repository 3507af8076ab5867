"""Downloads or unpacks shards that can't be read in place into a folder of limited size, once per node."""

import contextlib
import fcntl
import hashlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from trainer import timeouts
from trainer.config.options import DataOptions
from trainer.data.remote.decompress import NotUnpacked, plain_name, unpack
from trainer.data.remote.download import download, path_of, shown
from trainer.data.remote.eviction import FOLDER, claim, evict, is_at, make_folder, open_regular
from trainer.errors import ConfigError, DataError
from trainer.files import sha256_of
from trainer.log import log
from trainer.redact import redact_urls


class Remote(NamedTuple):
    """A shard that is a URL, a compressed file, or a program's output, instead of a path."""

    url: str  # with file:// before a path, and pipe: before a program
    file: Path  # of the downloaded shard, uncompressed
    most: int  # limit of the folder in bytes; shards in use may exceed it
    bytes: int = 0  # size when it was indexed
    sha256: str = ""
    ahead: bool = False  # whether it is downloaded ahead of use: then a lack of room or of an answer is an error

    @classmethod
    def kept(cls, url: str, folder: str, gb: float) -> "Remote":
        try:
            return cls(url, Path(folder).expanduser().absolute() / FOLDER / key_of(url), int(gb * 1e9))
        except RuntimeError:
            raise ConfigError(
                f"data.cache_dir={folder}: there is no home folder; give another folder, or set HOME"
            ) from None

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def name(self) -> str:
        return str(self) if self.url.startswith("pipe:") else plain_name(PurePosixPath(str(self)).name)

    @property
    def of_server(self) -> bool:
        return not self.url.startswith(("file://", "pipe:"))

    @property
    def may_change(self) -> bool:
        """Whether the content may change under the same key, which a local file's can't."""
        return not self.url.startswith("file://")

    def open(self) -> BinaryIO:
        """Open the complete shard, which is not evicted before this file is closed.

        Raises:
            DataError: The shard does not exist, or can't be stored in the folder.
            ConfigError: The shard has changed since it was indexed.
            UnavailableError: The server sent nothing for too long.
        """
        while (file := self._get()) is None:
            time.sleep(0.05)  # another process is downloading it
        return file

    def _get(self) -> BinaryIO | None:
        try:
            make_folder(self.file.parent)
            return self._find() or self._download()
        except OSError as error:
            raise DataError(
                f"{self}: can't be kept in {self.file.parent} ({error.strerror}); make room or make it writable, "
                "or give another data.cache_dir"
            ) from None

    def fetch(self) -> None:
        """Download the shard for a later `open`; raises the same errors."""
        if file := self._replace(ahead=True)._get():
            file.close()

    def drop(self) -> None:
        """Remove the shard, so that the next `open` downloads it."""
        self.file.unlink(missing_ok=True)

    def refuse_larger(self, size: int) -> None:
        if size > self.most:
            raise ConfigError(
                f"data.cache_gb={self.most / 1e9:g}: {self} alone has {size / 1e9:g} GB; raise data.cache_gb, or write "
                "smaller shards"
            )

    def _find(self) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError):
            file = os.fdopen(open_regular(self.file, os.O_RDONLY), "rb", buffering=0)
            fcntl.flock(file, fcntl.LOCK_SH)
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
            return file

    def _download(self) -> BinaryIO | None:
        """Download the shard. Return None if another process is doing so or has done so."""
        part = self.file.with_name(f".part-{self.file.name}")
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(os.fdopen(open_regular(part, os.O_RDWR | os.O_CREAT), "r+b"))
            if not claim(file) or not is_at(file, part):
                return None
            stack.callback(part.unlink, missing_ok=True)
            if self.file.exists():
                return None
            self._fill_and_compare(file)
            with self._locked_folder():
                over = self._evict()
                part.replace(self.file)
                fcntl.flock(file, fcntl.LOCK_SH)
            if over:
                text = "data.cache_gb=%g: %s has %g GB more, all in use; raise data.cache_gb"
                log.warning(text, self.most / 1e9, self.file.parent, over / 1e9)
            stack.pop_all()
            return file

    def _fill_and_compare(self, file: BinaryIO) -> None:
        """Download, and retry once if a server has sent something else, such as an error page."""
        try:
            self._fill(file)
            problem = self._has_changed(file) and "has another sha256 than its index"
        except NotUnpacked as error:
            if not self.of_server:
                raise
            problem = str(error)
        if problem and self.of_server:
            log.info("%s: %s; downloading it once more", self, problem)
            self._fill(file)
        if problem and self._has_changed(file):
            default, folder = os.path.expanduser(DataOptions.cache_dir), str(self.file.parent.parent)
            words = ["index", *(["--cache-dir", folder] if folder != default else [])]
            words += ["--allow-pipe"] if self.url.startswith("pipe:") else []
            raise ConfigError(
                f"{self}: changed since it was indexed; restore it, or index it again: "
                f"echelon shards {shlex.join([*words, redact_urls(self.url)])}"
            )

    def _has_changed(self, file: BinaryIO) -> bool:
        return sha256_of(file) != self.sha256 if self.sha256 else key_of(self.url) != self.file.name

    def _fill(self, file: BinaryIO) -> None:
        room, end = self.bytes, 0
        self._reserve(file, room)
        patience_s = (
            timeouts.AHEAD_S if self.ahead else timeouts.DOWNLOAD_S if self.sha256 else timeouts.FIRST_DOWNLOAD_S
        )
        with contextlib.closing(unpack(download(self.url, patience_s), self)) as parts:
            for start, content in parts:
                end = start + len(content)
                if end > room:  # not indexed yet, so its size was unknown
                    room = max(end, min(end + self.most // 100, self.most))
                    self._reserve(file, room)
                file.seek(start)
                file.write(content)
        file.truncate(end)  # a killed process may have left a longer file
        file.flush()
        os.fsync(file.fileno())

    def _reserve(self, file: BinaryIO, size: int) -> None:
        """Reserve `size` bytes in the folder, so that a partial download counts with its full size."""
        self.refuse_larger(size)
        with self._locked_folder():
            file.truncate(size)
            if self._evict() and self.ahead:
                file.truncate(0)
                raise DataError(f"{self}: there is no room for this shard yet")

    def _evict(self) -> int:
        return evict(self.file.parent, self.most, timeouts.SPARE_S if self.ahead else 0.0)

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        with open(self.file.with_name(".lock"), "ab", opener=open_regular) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def key_of(url: str) -> str:
    """Return the name of the shard's file in the folder. A local file that is rewritten gets another one."""
    if url.startswith("file://"):
        about = os.stat(path_of(url))
        url = f"file://{os.path.realpath(path_of(url))} {about.st_size} {about.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(url)).hexdigest()
