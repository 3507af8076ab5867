"""Compressed shards: which are, by name and by their first bytes, and how they are unpacked as their bytes come."""

import bz2
import contextlib
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from trainer.errors import DataError

LONGEST_START = 10  # bytes by which a kind is known
OTHERS = re.compile(rb"\x28\xb5\x2f\xfd|\x04\x22\x4d\x18|\x1f\x9d|LZIP|PK\x03\x04|7z\xbc\xaf")
PACKED = re.compile(r"(?i)\.(?:(t)(?:gz|bz2?|xz)|gz|bz2|xz)$")
PACKED_OTHERWISE = re.compile(r"(?i)\.(?:t?zstd?|t?lz4|lz|lzma|lzo|z|br|zip|7z)$")
WAY = "pack it with gzip, bzip2, xz or nothing, or let a program unpack it, as 'pipe:zstd -dc FILE'"
MOST_AT_ONCE = 8 << 20  # bytes that come out; a few that go in may become any number
MOST_MEMORY = 512 << 20  # bytes for xz, whose files say how many it takes: those of `xz -9` say 65 MiB
END = -1


def is_packed(name: str) -> bool:
    """Tell whether a shard is compressed, by its first bytes.

    Raises:
        DataError: by what is none of the three.
    """
    if PACKED_OTHERWISE.search(name):
        raise DataError(f"{name}: can't be unpacked; {WAY}")
    return PACKED.search(name) is not None


def starts_packed(first: bytes) -> bool:
    """Return whether bytes begin as those that `unpack` unpacks."""
    return any(re.match(start, first) for start in STARTS)


def plain_name(name: str) -> str:
    """Return the name of the unpacked shard: `a.tgz` and `a.tar.gz` are `a.tar`."""
    return PACKED.sub(lambda found: ".tar" if found[1] else "", name)


def unpack(parts: Generator[tuple[int, bytes]], where: object) -> Generator[tuple[int, bytes]]:
    """Bytes with their positions, as they are or unpacked, by what the first ones say. A position of 0 begins anew.

    Raises:
        DataError: naming `where`, for what is cut, damaged, or goes on after its end.
    """
    first, stream, done = b"", None, 0
    with contextlib.closing(parts):
        try:
            for start, content in itertools.chain(parts, [(END, b"")]):
                if start == 0:
                    first, stream, done = b"", None, 0
                if stream is None:
                    first += content
                    if len(first) < LONGEST_START and start != END:
                        continue
                    stream, content = stream_of(first, where), first
                for piece in stream.feed(content):
                    yield done, piece
                    done += len(piece)
            if stream and not stream.whole:
                raise EOFError("it ends too early")
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
            reason = f"can't be unpacked after {done} bytes ({error}): cut or damaged"
            raise DataError(f"{where}: {reason}; restore it or pack it again") from None


class AsItIs:
    whole = True

    def feed(self, content: bytes) -> Iterator[bytes]:
        yield content


class Streams:
    """One after the other they are one, as their tools have it, and zeros may fill the end."""

    def __init__(self, new: Callable[[], Any]) -> None:
        self.new, self.one = new, None

    @property
    def whole(self) -> bool:
        return self.one is None

    def feed(self, content: bytes) -> Iterator[bytes]:
        while content and (self.one or (content := content.lstrip(b"\0"))):
            self.one = one = self.one or self.new()
            piece = one.decompress(content, MOST_AT_ONCE)
            while piece:
                yield piece
                piece = b"" if one.eof else one.decompress(b"", MOST_AT_ONCE)
            content = b""
            if one.eof:
                content, self.one = one.unused_data, None


class Gzip:
    """zlib's decompressor, as those of bz2 and lzma are."""

    def __init__(self) -> None:
        self.zlib = zlib.decompressobj(wbits=31)

    def decompress(self, content: bytes, most: int) -> bytes:
        return self.zlib.decompress(self.zlib.unconsumed_tail + content, most)

    @property
    def eof(self) -> bool:
        return self.zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self.zlib.unused_data


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, MOST_MEMORY)


STARTS: dict[bytes, Callable[[], Any]] = {
    rb"\x1f\x8b\x08": Gzip,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.BZ2Decompressor,
    rb"\xfd7zXZ\0": _xz,
}


def stream_of(first: bytes, where: object) -> AsItIs | Streams:
    if OTHERS.match(first):
        raise DataError(f"{where}: can't be unpacked; {WAY}")
    return next((Streams(kind) for start, kind in STARTS.items() if re.match(start, first)), AsItIs())
