"""Bytes of a tar shard to members, members to samples. Keeps no state that matters: any process may read any sample."""

import contextlib
import io
import json
import os
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import load

from trainer.data.order import Ref
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.data.index import Index

READS = 3  # of a sample, before it counts as damaged
OPEN_SHARDS = 256  # per process; a batch reads `lanes` of them by turns, and 1024 files is the usual limit
BLOCK = tarfile.BLOCKSIZE
ZEROS = bytes(BLOCK)
GNU_NAME, GNU_LINK, PAX, PAX_SOLARIS, PAX_GLOBAL = EXTENDED = (b"L", b"K", b"x", b"X", b"g")
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")  # key, and all that follows the first dot of the file's own name
META = re.compile(r"__[^/]*__($|/)")


class Member(NamedTuple):
    """One entry of a tar; byte positions. What belongs to no sample (a folder, a link, `__meta__`) has the key None."""

    key: str | None
    extension: str
    start: int  # of its first header
    content: int
    size: int  # of the content
    end: int


class ShardReader:
    """Samples by reference. Can be pickled and forked: files are opened where they are read."""

    def __init__(self, index: "Index") -> None:
        self.index = index
        self._open: dict[int, tuple[BinaryIO, Any]] = {}  # the file and its rows of the index, in order of last use

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "_open": {}}

    def read(self, ref: Ref) -> dict[str, Any]:
        """The decoded members of a sample by extension, and its `__key__`.

        Raises:
            DataError: if the bytes are not those indexed, also when read again, or a member can't be decoded.
        """
        content = self._fetch(ref)
        path = self.index.shards[ref.shard].path
        sample: dict[str, Any] = {}
        for member in members(lambda offset, size: content[offset : offset + size], path):
            if member.key is not None:
                sample["__key__"] = member.key
                try:
                    sample[member.extension] = decode(
                        member.extension, content[member.content : member.content + member.size]
                    )
                except Exception as error:  # decoders raise whatever they like
                    name = f"{path}: sample {ref.offset} ({member.key!r}), member {member.extension!r}"
                    raise DataError(f"{name}: can't be decoded ({error}); write it again or leave it out") from error
        return sample

    def prefetch(self, refs: Sequence[Ref]) -> None:
        """Asks the system to have these samples in memory soon; returns at once."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for ref in sorted(refs):
            with contextlib.suppress(OSError):  # `read` tries again, and tells
                file, rows = self._shard(ref.shard)
                offset, length, _ = rows[ref.offset].tolist()
                os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)

    def _fetch(self, ref: Ref) -> bytes:
        content, reason = b"", ""
        for attempt in range(READS):
            if attempt:
                self._close(ref.shard)  # a network drive may have given a stale handle
                time.sleep(0.1 * attempt)
            try:
                file, rows = self._shard(ref.shard)
                offset, length, crc32 = rows[ref.offset].tolist()
                content = read_at(file.fileno(), offset, length)
                if zlib.crc32(content) == crc32:
                    return content
                reason = f"the checksum of {length} bytes at byte {offset} differs"
            except OSError as error:
                reason = str(error.strerror)
        name = f"{self.index.shards[ref.shard].path}: sample {ref.offset} ({_first_key(content)!r})"
        raise DataError(f"{name}: {reason}, read {READS} times; restore the shard")

    def _shard(self, number: int) -> tuple[BinaryIO, Any]:
        shard = self._open.pop(number, None)
        if shard is None:
            if len(self._open) >= OPEN_SHARDS:
                self._close(next(iter(self._open)))
            rows = self.index.samples(number)
            shard = self.index.shards[number].path.open("rb", buffering=0), rows
        self._open[number] = shard
        return shard

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.pop(number)[0].close()


def decode(extension: str, content: bytes) -> Any:
    """By the last of the extensions; bytes where it is none of `DECODERS`."""
    kind = extension.rpartition(".")[2]
    if kind in PICKLED:
        raise ValueError("unpickling can run any code: use npy, safetensors or json")
    decoder = DECODERS.get(kind)
    return decoder(content) if decoder else content


def _image(content: bytes) -> Any:
    from PIL import Image  # here, for who has no images needs no Pillow

    return Image.open(io.BytesIO(content)).convert("RGB")


def _npy(content: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp"), _image),
    **dict.fromkeys(("txt", "text"), bytes.decode),
    **dict.fromkeys(("cls", "int"), int),
    "json": json.loads,
    "npy": _npy,
    "safetensors": load,
}


def members(fetch: Callable[[int, int], bytes], where: Path) -> Iterator[Member]:
    """Walks a tar to its end or its first zero block; `fetch(offset, size)` gives fewer bytes at the end only.

    `tarfile.open` would take a damaged header for the end of the archive.

    Raises:
        DataError: naming `where` and the byte.
    """
    offset = 0
    while (block := fetch(offset, BLOCK)) not in (b"", ZEROS):
        start = offset
        fields: dict[str, str] = {}
        while (header := _header(block, where, offset)).type in EXTENDED:
            try:
                fields = _fields(header, fetch(offset + BLOCK, header.size)) | fields  # the first of several counts
            except ValueError as error:
                raise damaged(where, offset, f"bad extended header ({error})") from None
            offset += BLOCK + _padded(header.size)
            block = fetch(offset, BLOCK)
        if header.type == tarfile.GNUTYPE_SPARSE or any(name.startswith("GNU.sparse") for name in fields):
            raise DataError(f"{where}: a sparse file at byte {start}; write the shard without sparse files")
        size = int(fields.get("size", header.size))
        if header.type in tarfile.SUPPORTED_TYPES and not header.isreg():
            size = 0  # folders, links and devices have no content, whatever their header says
        content = offset + BLOCK
        offset = content + _padded(size)
        key, extension = split_name(fields.get("path", header.name)) if header.isreg() else (None, "")
        yield Member(key, extension, start, content, size, offset)


def split_name(name: str) -> tuple[str | None, str]:
    """Key and extensions as WebDataset has them: `a/b.SEG.png` is `a/b`, `seg.png`. None for what is no sample's."""
    match = None if META.match(name) else NAME.match(name)
    return (match[1], match[2].lower()) if match else (None, "")


def _header(block: bytes, where: Path, offset: int) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise damaged(where, offset, f"no header ({error})") from None
    if header.size < 0:
        raise damaged(where, offset, "negative size")
    return header


def _fields(header: tarfile.TarInfo, payload: bytes) -> dict[str, str]:
    """What an extended header says of the next member. A PAX record is `LENGTH NAME=VALUE` and a newline."""
    if len(payload) < header.size:
        raise ValueError("cut")
    if header.type in (GNU_NAME, GNU_LINK):
        path = payload.partition(b"\0")[0].decode(errors="surrogateescape")
        return {"path": path} if header.type == GNU_NAME else {}
    fields = {}
    payload = payload.rstrip(b"\0")
    while payload:
        digits = payload.partition(b" ")[0]
        record, payload = payload[len(digits) + 1 : int(digits)], payload[int(digits) :]
        name, equals, value = record[:-1].decode(errors="surrogateescape").partition("=")
        if not equals or record[-1:] != b"\n" or (name == "size" and not value.isdecimal()):
            raise ValueError("no PAX record")
        fields[name] = value.rstrip("/") if name == "path" else value
    if header.type == PAX_GLOBAL and not fields.keys().isdisjoint(("path", "size")):
        raise ValueError("a path or size for all members")
    return fields


def _first_key(content: bytes) -> str | None:
    """Of bytes that may be damaged."""
    try:
        return next(members(lambda offset, size: content[offset : offset + size], Path())).key
    except (DataError, StopIteration):
        return None


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def damaged(where: Path, offset: int, reason: str) -> DataError:
    return DataError(
        f"{where}: {reason} at byte {offset}: cut, damaged or not a plain tar; restore it or write it again"
    )


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Fewer than `size` bytes at the end of the file only; one `pread` may give fewer, and never over 2 GiB."""
    content = os.pread(fd, size, offset)
    while 0 < len(content) < size and (more := os.pread(fd, size - len(content), offset + len(content))):
        content += more
    return content
