"""From the bytes of a tar shard to samples. Keeps no state that matters: any process may read any sample."""

import contextlib
import io
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import load

from trainer.data.index import Index, opened
from trainer.data.order import Ref
from trainer.data.remote import Remote
from trainer.data.tar import members, read_at
from trainer.errors import DataError

READS = 3  # of a sample, before it counts as damaged
TRIES = 5  # to read it at all, within 4 s: a network drive may be away for a moment
OPEN_SHARDS = 256  # per process; a batch reads `lanes` of them by turns, and 1024 files is the usual limit
IDLE_S = 10.0  # until a shard that nothing was read from may be closed: while it's open, it can't leave the cache


class ShardReader:
    """Samples by reference. Can be pickled and forked: files are opened where they are read."""

    def __init__(self, index: Index) -> None:
        self.index = index
        # The file, its rows of the index, and when it was used; in the order of that.
        self._open: dict[int, tuple[BinaryIO, Any, float]] = {}

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
        for ref in sorted(refs):
            with contextlib.suppress(OSError):  # `read` tries again, and tells
                file, rows = self._shard(ref.shard)
                offset, length, _ = rows[ref.offset].tolist()
                os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)

    def _fetch(self, ref: Ref) -> bytes:
        content, reason = b"", ""
        path, tries, reads = self.index.shards[ref.shard].path, 0, 0
        while tries < TRIES and reads < READS:
            if tries:
                self._close(ref.shard)  # a network drive may have given a stale handle
                time.sleep(0.1 * 3 ** (tries - 1))
            tries += 1
            try:
                file, rows = self._shard(ref.shard)
                offset, length, crc32 = rows[ref.offset].tolist()
                shard = self.index.shards[ref.shard]
                if not 0 <= offset <= offset + length <= shard.bytes:
                    raise DataError(f"{shard.stored}: {length} bytes at byte {offset}: damaged; remove it")
                content = read_at(file.fileno(), offset, length)
                if zlib.crc32(content) == crc32:
                    return content
                reads, reason = reads + 1, f"the checksum of {length} bytes at byte {offset} differs"
                if isinstance(path, Remote):
                    path.drop()  # damaged here, maybe, and not there
            except OSError as error:
                reason = str(error.strerror)
        name = f"{path}: sample {ref.offset} ({_first_key(content)!r})"
        raise DataError(f"{name}: {reason}, read {tries} times; restore the shard")

    def _shard(self, number: int) -> tuple[BinaryIO, Any]:
        if number in self._open:
            file, rows, _ = self._open.pop(number)
        else:
            for other, (_, _, used) in list(self._open.items()):
                if len(self._open) < OPEN_SHARDS and time.monotonic() - used < IDLE_S:
                    break
                self._close(other)
            rows = self.index.samples(number)
            file = opened(self.index.shards[number].path)
        self._open[number] = file, rows, time.monotonic()
        return file, rows

    def close(self) -> None:
        """The files; `read` would open them again."""
        for number in list(self._open):
            self._close(number)

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


def _first_key(content: bytes) -> str | None:
    """Of bytes that may be damaged."""
    try:
        return next(members(lambda offset, size: content[offset : offset + size], "")).key
    except (DataError, StopIteration):
        return None
