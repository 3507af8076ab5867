"""From the bytes of a tar shard to samples. Keeps no state that matters: any process may read any sample."""

import contextlib
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from trainer.data.remote.shard import Remote
from trainer.data.sampling.order import Ref
from trainer.data.shards.decoders import decode
from trainer.data.shards.index import Index, opened
from trainer.data.shards.tar import members, read_at
from trainer.errors import DataError, UnavailableError

READS = 3  # of a sample, before it counts as damaged
PATIENCE_S = 30.0  # with what it lies on: a network drive may be away for a while
LONGEST_PAUSE_S = 3.0
OPEN_SHARDS = 256  # per process; a batch reads `lanes` of them by turns, and 1024 files is the usual limit
IDLE_S = 10.0  # until a shard that nothing was read from may be closed: while it's open, it can't leave the cache


class ShardReader:
    """Samples by reference. Can be pickled and forked: files are opened where they are read.

    Args:
        timeout_s: After which others give up waiting for a sample; less, so that what is away is named.
    """

    def __init__(
        self, index: Index, decoders: Sequence[Callable[[str, bytes], Any]] = (), timeout_s: float = math.inf
    ) -> None:
        self.index, self.decoders, self.patience_s = index, decoders, min(PATIENCE_S, timeout_s / 2)
        # The file, its rows of the index, and when it was used; in the order of that.
        self._open: dict[int, tuple[BinaryIO, Any, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def read(self, ref: Ref) -> dict[str, Any]:
        """Read the decoded members of a sample by extension, and its `__key__`.

        Raises:
            DataError: if the bytes are not those indexed, also when read again, or a member can't be decoded.
            UnavailableError: if they can't be read, for `patience_s`.
        """
        content = self._fetch(ref)
        path = self.index.shards[ref.shard].path
        sample: dict[str, Any] = {}
        for member in members(lambda offset, size: content[offset : offset + size], path):
            if member.key is not None:
                sample["__key__"] = member.key
                try:
                    own = content[member.content : member.content + member.size]
                    sample[member.extension] = decode(member.extension, own, self.decoders)
                except MemoryError:
                    raise
                except Exception as error:  # decoders raise whatever they like
                    name = f"{path}: sample {ref.offset} ({member.key!r}), member {member.extension!r}"
                    if isinstance(error, OSError) and error.errno:  # the system's; Pillow's own have no number
                        raise UnavailableError(f"{name}: {error}; mend that, then resume") from error
                    raise DataError(f"{name}: can't be decoded ({error}); write it again or leave it out") from error
        return sample

    def name(self, ref: Ref) -> tuple[str, str | None]:
        """Name a bad sample: its shard, and its key if that can be read."""
        shard, content = self.index.shards[ref.shard], b""
        with contextlib.suppress(OSError, UnavailableError):
            file, rows = self._shard(ref.shard)
            offset, length, _ = rows[ref.offset].tolist()
            content = os.pread(file.fileno(), min(length, shard.bytes), offset)
        return str(shard.path), _first_key(content)

    def prefetch(self, refs: Sequence[Ref]) -> None:
        """Asks the system to have these samples in memory soon; returns at once, so it leaves out what is to come from
        a server first."""
        for ref in sorted(refs):
            if ref.shard not in self._open and isinstance(self.index.shards[ref.shard].path, Remote):
                continue
            with contextlib.suppress(OSError, UnavailableError):  # `read` tries again, and tells
                file, rows = self._shard(ref.shard)
                offset, length, _ = rows[ref.offset].tolist()
                os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)

    def _fetch(self, ref: Ref) -> bytes:
        content, reads, pause_s, began = b"", 0, 0.1, time.monotonic()
        path = self.index.shards[ref.shard].path
        while True:
            try:
                file, rows = self._shard(ref.shard)
                offset, length, crc32 = rows[ref.offset].tolist()
                shard = self.index.shards[ref.shard]
                if not 0 <= offset < offset + length <= shard.bytes:
                    raise DataError(f"{shard.index_path}: {length} bytes at byte {offset}: damaged; remove it")
                content = read_at(file.fileno(), offset, length)
                if zlib.crc32(content) == crc32:
                    return content
                reads += 1
                if reads == READS:
                    name = f"{path}: sample {ref.offset} ({_first_key(content)!r})"
                    told = f"the checksum of {length} bytes at byte {offset} differs, read {reads} times"
                    raise DataError(f"{name}: {told}; restore the shard")
                if isinstance(path, Remote):
                    path.drop()  # damaged here, maybe, and not there
            except OSError as error:
                if time.monotonic() + pause_s - began > self.patience_s:
                    told = f"{error.filename or path}: {error.strerror or error}, for {self.patience_s:g} s"
                    raise UnavailableError(f"{told}; see to the disk or the network, then resume") from None
            self._close(ref.shard)  # a network drive may have given a stale handle
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 3 * pause_s)

    def _shard(self, number: int) -> tuple[BinaryIO, Any]:
        if number in self._open:
            file, rows, _ = self._open.pop(number)
        else:
            for other, (_, _, used) in list(self._open.items()):
                if len(self._open) < OPEN_SHARDS and time.monotonic() - used < IDLE_S:
                    break
                self._close(other)
            try:
                file = opened(self.index.shards[number].path)  # first: where it is away, so is its index
                rows = self.index.samples(number)
            except DataError as error:  # no sample is damaged by it
                raise UnavailableError(str(error)) from None
        self._open[number] = file, rows, time.monotonic()
        return file, rows

    def remote(self) -> dict[int, Remote]:
        """Return the shards at URLs, by number."""
        return {i: shard.path for i, shard in enumerate(self.index.shards) if isinstance(shard.path, Remote)}

    def close(self) -> None:
        """Close the files; `read` would open them again."""
        for number in list(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.pop(number)[0].close()


def _first_key(content: bytes) -> str | None:
    """Find the first key in bytes that may be damaged."""
    try:
        return next(members(lambda offset, size: content[offset : offset + size], "")).key
    except (DataError, StopIteration):
        return None
