"""Measures a disk, and reading shards as in training."""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.data.sampling.order import walk
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.tools.doctor.disk import forget, speed

SAMPLE_BYTES, SAMPLES, PER_SHARD = 16 << 10, 2048, 512  # of the shards that the bench makes: 32 MiB
READ_FOR = 2.0  # shards are read for so long at most


def disk(folder: Path, size: int) -> dict[str, float]:
    """Return the bytes/s of writing and syncing a file of `size` bytes, and of reading it."""
    write_s, read_s = speed(folder, size)
    return {"write_bytes_per_s": size / write_s, "read_bytes_per_s": size / read_s}


def shards(folder: Path, names: list[str]) -> dict[str, float]:
    """Return the samples/s and bytes/s of one process that reads and decodes samples in the order of the shards.

    Args:
        folder: If there are no `names`, temporary shards of random bytes are written here.
        names: Shards as a recipe names them. Their index is stored next to them, as by a run.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="echelon-bench-") as made:
        paths: list[Any] = (
            find_shards(names) if names else list(write_shards(samples(), Path(made), "bench", PER_SHARD))
        )
        index = Index.open(paths)
        for path in paths:
            if isinstance(path, Path):
                with path.open("rb") as file:
                    forget(file)
        return read(index)


def samples() -> Iterator[Mapping[str, Any]]:
    for number in range(SAMPLES):
        yield {"__key__": f"{number:06d}", "bin": os.urandom(SAMPLE_BYTES), "cls": number}


def read(index: Index) -> dict[str, float]:
    reader, count, size = ShardReader(index), 0, 0
    sizes = [index.samples(shard) for shard in range(len(index.shards))]
    began = time.perf_counter()
    for ref in itertools.chain.from_iterable(walk(index.counts, 0, 1, PER_SHARD)):
        reader.read(ref)
        count, size = count + 1, size + int(sizes[ref.shard][ref.offset][1])
        if time.perf_counter() - began > READ_FOR:
            break
    seconds = time.perf_counter() - began
    reader.close()
    return {"samples_per_s": count / seconds, "bytes_per_s": size / seconds}
