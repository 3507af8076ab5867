"""Shards that can't be read where they are: each comes whole, by one process a node, to a folder of bounded size."""

import contextlib
import fcntl
import hashlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from trainer.config.options import DataOptions
from trainer.config.redact import redact_urls
from trainer.data.remote.decompress import plain_name, unpack
from trainer.data.remote.download import download, path_of, shown
from trainer.data.remote.eviction import claim, is_at, make_room, open_regular
from trainer.errors import ConfigError, DataError
from trainer.log import log

PATIENCE_S = 300.0  # without a new byte of a shard that was had before; less than trainer.timeout_s
FIRST_S = 30.0  # of one that was not: its URL may be wrong
AHEAD_S, SPARE_S = 1.0, 5.0  # of one that nobody waits for yet; for which what was used is not removed for it


class Remote(NamedTuple):
    """A shard that is a URL, a compressed file, or a program's output, in place of a path."""

    url: str  # with file:// before a path, and pipe: before a program
    file: Path  # where it is kept, unpacked
    most: int  # bytes that this folder may hold, but for what is in use
    bytes: int = 0  # of what was indexed
    sha256: str = ""
    ahead: bool = False  # of its use: without room beside what is used, or an answer, it is let be

    @classmethod
    def kept(cls, url: str, folder: str, gb: float) -> "Remote":
        try:
            return cls(url, Path(folder).expanduser().absolute() / key_of(url), int(gb * 1e9))
        except RuntimeError:
            raise ConfigError(f"data.cache_dir={folder}: there is no home folder; give another, or set HOME") from None

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def name(self) -> str:
        return str(self) if self.url.startswith("pipe:") else plain_name(PurePosixPath(str(self)).name)

    @property
    def may_change(self) -> bool:
        """Without another name in the folder: a local file that was written again has one."""
        return not self.url.startswith("file://")

    def open(self) -> BinaryIO:
        """Open the whole shard, which stays in the folder until this file is closed.

        Raises:
            DataError: it is not there, or the folder can't take it.
            ConfigError: it is not what was indexed.
            UnavailableError: the server gave nothing for too long.
        """
        while (file := self._get()) is None:
            time.sleep(0.05)  # another process downloads it
        return file

    def _get(self) -> BinaryIO | None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            return self._find() or self._download()
        except OSError as error:
            raise DataError(
                f"{self}: can't be kept in {self.file.parent} ({error.strerror}); mend that, or give another "
                "data.cache_dir"
            ) from None

    def fetch(self) -> None:
        """For an `open` to come. Raises what that would."""
        if file := self._replace(ahead=True)._get():
            file.close()

    def drop(self) -> None:
        """Remove the shard; the next `open` downloads it."""
        self.file.unlink(missing_ok=True)

    def refuse_larger(self, size: int) -> None:
        if size > self.most:
            has = f"data.cache_gb={self.most / 1e9:g}: {self} alone has {size / 1e9:g} GB"
            raise ConfigError(f"{has}; give it more, or write smaller shards")

    def _find(self) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError):
            file = os.fdopen(open_regular(self.file, os.O_RDONLY), "rb", buffering=0)
            fcntl.flock(file, fcntl.LOCK_SH)
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
            return file

    def _download(self) -> BinaryIO | None:
        """None where another process does, or has."""
        part = self.file.with_name(f".part-{self.file.name}")
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(os.fdopen(open_regular(part, os.O_RDWR | os.O_CREAT), "r+b"))
            if not claim(file) or not is_at(file, part):
                return None
            stack.callback(part.unlink, missing_ok=True)
            if self.file.exists():
                return None
            self._fill(file)
            with self._locked_folder():
                over = make_room(self.file.parent, self.most, SPARE_S if self.ahead else 0.0)
                part.replace(self.file)
                fcntl.flock(file, fcntl.LOCK_SH)
            if over:
                told = "data.cache_gb=%g: %s holds %g GB more, all in use; give it more"
                log.warning(told, self.most / 1e9, self.file.parent, over / 1e9)
            stack.pop_all()
            return file

    def _fill(self, file: BinaryIO) -> None:
        room, end = self.bytes, 0
        self._reserve(file, room)
        patience_s = AHEAD_S if self.ahead else PATIENCE_S if self.sha256 else FIRST_S
        with contextlib.closing(unpack(download(self.url, patience_s), self)) as parts:
            for start, content in parts:
                end = start + len(content)
                if end > room:  # nobody has indexed it yet
                    room = max(end, min(end + self.most // 100, self.most))
                    self._reserve(file, room)
                file.seek(start)
                file.write(content)
        file.truncate(end)  # a process that was killed may have left more
        file.flush()
        os.fsync(file.fileno())
        if sha256_of(file) != self.sha256 if self.sha256 else key_of(self.url) != self.file.name:
            usual = os.path.expanduser(DataOptions.cache_dir)
            words = ["index", *(["--cache-dir", str(self.file.parent)] if str(self.file.parent) != usual else [])]
            words += ["--allow-pipe"] if self.url.startswith("pipe:") else []
            raise ConfigError(
                f"{self}: changed since it was indexed; restore it, or index it again: "
                f"python -m trainer.tools.shards {shlex.join([*words, redact_urls(self.url)])}"
            )

    def _reserve(self, file: BinaryIO, size: int) -> None:
        """Room for what will come: a part counts with all its bytes."""
        self.refuse_larger(size)
        with self._locked_folder():
            file.truncate(size)
            over = make_room(self.file.parent, self.most, SPARE_S if self.ahead else 0.0)
            if over and self.ahead:
                file.truncate(0)
                raise DataError(f"{self}: no room for it yet")

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        with open(self.file.with_name(".lock"), "ab", opener=open_regular) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def key_of(url: str) -> str:
    """Return the shard's key in the cache: a file that was written again is another one."""
    if url.startswith("file://"):
        about = os.stat(path_of(url))
        url = f"file://{os.path.realpath(path_of(url))} {about.st_size} {about.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(url)).hexdigest()


def sha256_of(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while content := file.read(1 << 20):
        digest.update(content)
    return digest.hexdigest()
