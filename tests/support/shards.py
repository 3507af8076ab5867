"""A few shards with random bytes, as tests of what brings them from elsewhere write, find and read them."""

import random
from pathlib import Path
from typing import Any

from trainer.config.options import DataOptions
from trainer.data.sampling.order import walk
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards

SHARDS, EACH = 4, 6


def write(folder: Path) -> list[Path]:
    rng = random.Random(0)
    samples = ({"__key__": f"{i:03d}", "bin": rng.randbytes(40_000), "cls": i} for i in range(SHARDS * EACH))
    return write_shards(samples, folder, "s", per_shard=EACH)


def options(tmp_path: Path, **more: Any) -> DataOptions:
    return DataOptions(cache_dir=str(tmp_path / "cache"), **more)


def remote(tmp_path: Path, url: str, **more: Any) -> list[Any]:
    return find_shards(url, options(tmp_path, **more))


def samples(index: Index) -> list[dict[str, Any]]:
    reader = ShardReader(index)
    found = [reader.read(ref) for ref in walk(index.counts, 0, 1)]
    reader.close()
    return found
