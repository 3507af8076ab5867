"""Reads samples from tar shards. Any process may read any sample, because a reader's only state is its open files."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from zlib_ng import zlib_ng

from trainer import timeouts
from trainer.data.remote.shard import Remote
from trainer.data.sampling.order import Ref, Refs, groups
from trainer.data.shards.decoders import Deferred, decode, undecodable
from trainer.data.shards.index import Index, opened
from trainer.data.shards.tar import Member, members, read_into
from trainer.errors import DataError, UnavailableError

BUFFER = 1 << 20  # bytes: a larger sample is read into memory of its own
READS = 3  # tries before a sample counts as damaged
OPEN_SHARDS = 256  # per process; a batch reads from `lanes` shards, and the usual limit is 1024 files


class ShardReader:
    """Samples by reference. A reader can be pickled and forked: files are opened in the process that reads them.

    Args:
        timeout_s: The rank's limit when it waits for a batch. The reader gives up earlier, so that its error names the
            file.
    """

    def __init__(
        self, index: Index, decoders: Sequence[Callable[[str, bytes], Any]] = (), timeout_s: float = math.inf
    ) -> None:
        self.index, self.decoders, self.patience_s = index, decoders, min(timeouts.READ_S, timeout_s / 2)
        # Shard -> its file, its rows of the index, and the time of its last use; least recently used first.
        self._open: dict[int, tuple[BinaryIO, Any, float]] = {}
        self._buffer = bytearray()  # for each sample again: new memory is cleared by the kernel

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}, "_buffer": bytearray()}

    rows = None  # nothing is in memory, unlike a TensorDataset

    def reads(self, refs: Refs, at_once: bool) -> tuple[Callable[[Any], Any], Sequence[Any], Exception | None]:
        """Return a function, its argument for each sample, and why the samples could not be read at once."""
        return self.read, refs, None

    def leave_many(self, fault: Exception) -> None:
        """Do nothing: each sample is read by itself."""

    def read(self, ref: Ref) -> dict[str, Any]:
        """Read a sample: its decoded members by extension, and its `__key__`.

        Raises:
            DataError: The bytes differ from the index even after a second read, or a member can't be decoded.
            UnavailableError: The bytes could not be read for `patience_s`.
        """
        content = self._fetch(ref)
        path = self.index.shards[ref.shard].path
        sample: dict[str, Any] = {}
        for member in members(part_of(content), path, known=True):
            if member.key is not None:
                sample["__key__"] = member.key
                try:
                    own = bytes(content[member.content : member.content + member.size])
                    value = sample[member.extension] = decode(member.extension, own, self.decoders)
                    if isinstance(value, Deferred):
                        value.place = _place(path, ref, member)
                except MemoryError:
                    raise
                except Exception as error:  # decoders may raise anything
                    raise undecodable(error, _place(path, ref, member), "write it again or leave it out") from error
        return sample

    def name(self, ref: Ref) -> tuple[str, str | None]:
        """Return the shard and the key of a bad sample, None for an unreadable key."""
        shard, content = self.index.shards[ref.shard], b""
        with contextlib.suppress(OSError, UnavailableError):
            file, rows = self._shard(ref.shard)
            offset, length, _ = rows[ref.offset].tolist()
            content = os.pread(file.fileno(), min(length, shard.bytes), offset)
        return str(shard.path), _first_key(memoryview(content))

    def begin_worker(self, worker: int) -> None:
        """Do nothing, because a reader opens a shard when it first reads it."""

    def prefetch(self, refs: Refs) -> None:
        """Ask the system to read these samples into memory, without waiting. Shards not yet downloaded are skipped."""
        for number, here in groups(refs.rows[:, 1]):
            if number not in self._open and isinstance(self.index.shards[number].path, Remote):
                continue
            with contextlib.suppress(OSError, UnavailableError):  # `read` tries again, and reports the error
                file, rows = self._shard(number)
                for offset, length, _ in rows[np.sort(refs.rows[here, 2])].tolist():
                    os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)

    def _fetch(self, ref: Ref) -> memoryview:
        """Return a sample's bytes, which are valid until the next call."""
        reads, pause_s, began = 0, 0.1, time.monotonic()
        path = self.index.shards[ref.shard].path
        while True:
            try:
                file, rows = self._shard(ref.shard)
                offset, length, crc32 = rows[ref.offset].tolist()
                shard = self.index.shards[ref.shard]
                if not 0 <= offset < offset + length <= shard.bytes:
                    raise DataError(f"{shard.index_path}: {length} bytes at byte {offset}: damaged; remove it")
                content = read_into(self._memory(length), file.fileno(), offset)
                if zlib_ng.crc32(content) == crc32:
                    return content
                reads += 1
                if reads == READS:
                    name = f"{path}: sample {ref.offset} ({_first_key(content)!r})"
                    reason = f"the checksum of {length} bytes at byte {offset} differs, read {reads} times"
                    raise DataError(f"{name}: {reason}; restore the shard")
                if isinstance(path, Remote):
                    path.drop()  # maybe only the downloaded copy is damaged
            except OSError as error:
                if time.monotonic() + pause_s - began > self.patience_s:
                    reason = f"{error.strerror or error}, for {self.patience_s:g} s"
                    fix = "check the disk and the network, then resume"
                    raise UnavailableError(f"{error.filename or path}: {reason}; {fix}") from None
            self._close(ref.shard)  # the handle of a file on a network drive may be stale
            time.sleep(pause_s)
            pause_s = min(timeouts.READ_PAUSE_S, 3 * pause_s)

    def _memory(self, size: int) -> memoryview:
        if size > BUFFER:
            return memoryview(bytearray(size))
        if not self._buffer:
            self._buffer = bytearray(BUFFER)
        return memoryview(self._buffer)[:size]

    def _shard(self, number: int) -> tuple[BinaryIO, Any]:
        if number in self._open:
            file, rows, _ = self._open.pop(number)
        else:
            for other, (_, _, used) in list(self._open.items()):
                if len(self._open) < OPEN_SHARDS and time.monotonic() - used < timeouts.IDLE_S:
                    break
                self._close(other)
            try:
                file = opened(self.index.shards[number].path)  # before its index: raises if the disk is away
                rows = self.index.samples(number)
            except DataError as error:  # the shard is unavailable, so no sample counts as bad
                raise UnavailableError(str(error)) from None
        self._open[number] = file, rows, time.monotonic()
        return file, rows

    def remote(self) -> dict[int, Remote]:
        """Return the shards at URLs, by number."""
        return {i: shard.path for i, shard in enumerate(self.index.shards) if isinstance(shard.path, Remote)}

    def close(self) -> None:
        """Close the files. A later `read` opens them again."""
        for number in list(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.pop(number)[0].close()


def _place(path: object, ref: Ref, member: Member) -> str:
    return f"{path}: sample {ref.offset} ({member.key!r}), member {member.extension!r}"


def part_of(content: memoryview) -> Callable[[int, int], bytes]:
    return lambda offset, size: bytes(content[offset : offset + size])


def _first_key(content: memoryview) -> str | None:
    try:
        return next(members(part_of(content), "")).key
    except (DataError, StopIteration):
        return None
