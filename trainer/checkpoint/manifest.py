"""Writes and verifies the files of a checkpoint and their manifest: sizes and sha256. Standard library only."""

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trainer import timeouts
from trainer.errors import ConfigError
from trainer.files import sha256_of, sync

MANIFEST = "MANIFEST.json"
FORMAT = 4  # since 3 each rank has a JSON file of its own; since 4 a part of a tensor names its dimension
READABLE = (2, 3, FORMAT)
MANIFEST_BYTES = 64 << 20  # a larger manifest is refused
CHUNK = 4 << 20  # bytes that are hashed, then written
SYNCED = 64 << 20  # bytes between two syncs, so that heartbeats distinguish a slow disk from one that hangs
STEP = re.compile(r"step-([0-9]{8,})")
FILE = re.compile(r"[A-Za-z0-9._-]+")
Entries = dict[str, list[int | str]]  # name of a file -> its size and sha256

# Errors that mean a damaged checkpoint. Any other OSError (permissions, too many open files) has another cause.
DAMAGE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is not a folder",
    errno.ELOOP: "is a symbolic link",
    errno.EISDIR: "is not a plain file",
    errno.ENXIO: "is not a plain file",
    errno.ENAMETOOLONG: "has a name that is too long for a file",
    errno.EIO: "can't be read (input/output error)",
}


class Damaged(ConfigError):
    """A checkpoint that differs from what was written. The message names the file and the difference."""


def write_files(folder: Path, files: Mapping[str, memoryview], moved: Callable[[], object]) -> Entries:
    """Write new files; return their entries once the bytes are on disk. Call `moved` after each piece."""
    entries: Entries = {}
    with _opened(folder) as descriptor:
        for name in sorted(files):
            assert FILE.fullmatch(name), name
            entries[name] = [files[name].nbytes, _write(descriptor, name, files[name], moved)]
    return entries


def seal(folder: Path, step: int, entries: Entries, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of the files in `folder`, and sync it."""
    assert not manifest.keys() & {"format", "step", "files", "sha256"}, manifest.keys()
    files = {name: entries[name] for name in sorted(entries)}
    with _opened(folder) as descriptor:
        content = _render({"format": FORMAT, "step": step, **manifest, "files": files})
        _write(descriptor, MANIFEST, memoryview(content), lambda: None)
    sync(folder)


def verify(checkpoint: Path, hashes: bool = True) -> dict[str, Any]:
    """Check every file that the manifest names, and return the manifest. Without `hashes`, check only the sizes.

    An input/output error is retried, because a network file system's may be transient.

    Raises:
        Damaged: A file differs. The message names the file and the difference.
    """
    for pause_s in timeouts.REREADS_S:
        try:
            return _verify(checkpoint, hashes)
        except Damaged as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EIO:
                raise
        time.sleep(pause_s)
    return _verify(checkpoint, hashes)


@contextmanager
def opened(checkpoint: Path, name: str) -> Iterator[Path]:
    """Open the file, and yield a path that refers to it even if another file takes its name meanwhile.

    Raises:
        Damaged: The file is a link, not a plain file, or can't be read.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context(_open(held.enter_context(_opened(checkpoint)), name))
        except OSError as error:
            if error.errno not in DAMAGE or error.errno == errno.EIO:  # an input/output error may be transient
                raise
            raise Damaged(f"{checkpoint / name}: {DAMAGE[error.errno]}") from error
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _verify(checkpoint: Path, hashes: bool) -> dict[str, Any]:
    name = ""
    try:
        with _opened(checkpoint) as descriptor:
            name = MANIFEST
            manifest = _read(checkpoint, descriptor)
            for name, (size, digest) in manifest["files"].items():
                with _open(descriptor, name) as file:
                    if (found := os.fstat(file.fileno()).st_size) != size:
                        raise Damaged(f"{checkpoint / name}: {found} bytes, its manifest says {size}")
                    if hashes and sha256_of(file) != digest:
                        raise Damaged(f"{checkpoint / name}: its sha256 is not the manifest's")
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise Damaged(f"{checkpoint / name}: {DAMAGE[error.errno]}") from error
    if (match := STEP.fullmatch(checkpoint.name)) and int(match[1]) != manifest["step"]:
        raise Damaged(f"{checkpoint}: its manifest says step {manifest['step']}")
    return manifest


def _write(folder: int, name: str, content: memoryview, moved: Callable[[], object]) -> str:
    """Allocate a new file, write it, and return its sha256. Hashing and writing release the interpreter's lock."""
    digest = hashlib.sha256()
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        if content.nbytes:
            _claim(file, content.nbytes)
        for start in range(0, content.nbytes, CHUNK):
            chunk = content[start : start + CHUNK]
            digest.update(chunk)
            while chunk:
                chunk = chunk[os.write(file, chunk) :]
            if (start + CHUNK) % SYNCED == 0:
                os.fdatasync(file)
            moved()
        os.fsync(file)
    finally:
        os.close(file)
    return digest.hexdigest()


def _claim(file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # any other error: this file system can't allocate in advance


def _render(manifest: dict[str, Any]) -> bytes:
    """Return canonical strict JSON with its own sha256; readers compare the bytes, which detects any flipped bit."""
    plain = json.dumps(manifest, allow_nan=False, indent=1)
    return json.dumps({**manifest, "sha256": hashlib.sha256(plain.encode()).hexdigest()}, indent=1).encode()


def _read(checkpoint: Path, descriptor: int) -> dict[str, Any]:
    with _open(descriptor, MANIFEST) as file:
        content = file.read() if os.fstat(file.fileno()).st_size <= MANIFEST_BYTES else b""
    try:
        manifest = json.loads(content)
        if (
            isinstance(manifest, dict)
            and _render({key: manifest[key] for key in manifest if key != "sha256"}) == content
        ):
            files = manifest["files"].items()
            plain = all(FILE.fullmatch(name) and [type(x) for x in entry] == [int, str] for name, entry in files)
            if plain and manifest["format"] in READABLE and type(manifest["step"]) is int:
                return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # refused below, like a well-formed but wrong manifest
    raise Damaged(f"{checkpoint / MANIFEST}: damaged, edited, or of another format than {READABLE}")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _open(folder: int, name: str) -> Iterator[BinaryIO]:
    """Open a plain file without following a link or blocking on a pipe."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

    with open(name, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EISDIR, DAMAGE[errno.EISDIR], name)
        yield file


def see(checkpoint: Path, sha256: str, hashes: bool) -> tuple[dict[str, Any], str]:
    """Return the manifest whose own hash is `sha256`, or why it isn't visible within `timeouts.VISIBLE_S` seconds.

    With `hashes`, compare all files, as rank 0 did, because another node may read different bits.
    """
    deadline = time.monotonic() + timeouts.VISIBLE_S
    while True:
        try:
            manifest = verify(checkpoint, hashes)
            if manifest["sha256"] == sha256:
                return manifest, ""
            why = f"{checkpoint}: is another checkpoint of this name"
        except (Damaged, OSError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            return {}, why
        time.sleep(timeouts.VISIBLE_EVERY_S)
