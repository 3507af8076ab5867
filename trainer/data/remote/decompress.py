"""Recognises compressed shards by name and first bytes, and decompresses them as a stream."""

import bz2
import contextlib
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from trainer.errors import DataError

LONGEST_START = 10  # bytes that identify a format
OTHERS = re.compile(rb"\x28\xb5\x2f\xfd|\x04\x22\x4d\x18|\x1f\x9d|LZIP|PK\x03\x04|7z\xbc\xaf")
PACKED = re.compile(r"(?i)\.(?:(t)(?:gz|bz2?|xz)|gz|bz2|xz)$")
PACKED_OTHERWISE = re.compile(r"(?i)\.(?:t?zstd?|t?lz4|lz|lzma|lzo|z|br|zip|7z)$")
FIX = "compress it with gzip, bzip2, xz or not at all, or let a program unpack it, as 'pipe:zstd -dc FILE'"
MOST_AT_ONCE = 8 << 20  # bytes of output at a time, because a few bytes of input may expand to any size
INPUT = 16 << 10  # bytes of input at a time, because what is left of them is copied at the end of each stream
MOST_MEMORY = 512 << 20  # bytes for xz, whose files determine the amount: those of `xz -9` need 65 MiB
END = -1


class NotUnpacked(DataError):
    """A compressed shard is truncated or damaged."""


def is_packed(name: str) -> bool:
    """Return whether a shard is compressed, judging by its name. Formats other than gzip, bzip2 and xz are refused."""
    if PACKED_OTHERWISE.search(name):
        raise DataError(f"{name}: can't be unpacked; {FIX}")
    return PACKED.search(name) is not None


def starts_packed(first: bytes) -> bool:
    """Return whether `unpack` decompresses a shard that begins with these bytes."""
    return any(re.match(start, first) for start in STARTS)


def plain_name(name: str) -> str:
    """Return the name of the unpacked shard: `a.tgz` and `a.tar.gz` are `a.tar`."""
    return PACKED.sub(lambda found: ".tar" if found[1] else "", name)


def unpack(parts: Generator[tuple[int, bytes]], where: object) -> Generator[tuple[int, bytes]]:
    """Yield the decompressed bytes with their positions, detecting the format. A position of 0 means a restart.

    Raises:
        NotUnpacked: The content is truncated, damaged, or continues after its end. The message names `where`.
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
                raise EOFError("unexpected end")
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
            reason = f"can't be unpacked after {done} bytes ({error}): cut or damaged"
            raise NotUnpacked(f"{where}: {reason}; restore it or compress it again") from None


class Uncompressed:
    """Passes bytes on, with the interface of `Streams`."""

    whole = True

    def feed(self, content: bytes) -> Iterator[bytes]:
        yield content


class Streams:
    """Decompresses concatenated streams as one, like the formats' own tools. Zeros may follow the end."""

    def __init__(self, new: Callable[[], Any]) -> None:
        self.new, self.current = new, None

    @property
    def whole(self) -> bool:
        return self.current is None

    def feed(self, content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), INPUT):
            yield from self._feed(content[start : start + INPUT])

    def _feed(self, content: bytes) -> Iterator[bytes]:
        while content and (self.current or (content := content.lstrip(b"\0"))):
            self.current = current = self.current or self.new()
            piece = current.decompress(content, MOST_AT_ONCE)
            while piece:
                yield piece
                piece = b"" if current.eof else current.decompress(b"", MOST_AT_ONCE)
            content = b""
            if current.eof:
                content, self.current = current.unused_data, None


class Gzip:
    """zlib's decompressor with the interface of those of bz2 and lzma."""

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


STARTS: dict[bytes, Callable[[], Any]] = {
    rb"\x1f\x8b\x08": Gzip,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.BZ2Decompressor,
    rb"\xfd7zXZ\0": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, MOST_MEMORY),
}


def stream_of(first: bytes, where: object) -> Uncompressed | Streams:
    if OTHERS.match(first):
        raise DataError(f"{where}: can't be unpacked; {FIX}")
    return next((Streams(kind) for start, kind in STARTS.items() if re.match(start, first)), Uncompressed())
