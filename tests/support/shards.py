"""A few shards with random bytes, as tests of what brings them from elsewhere write, find and read them."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.http import Proxy
from trainer.config.options import DataOptions
from trainer.data.remote.eviction import FOLDER
from trainer.data.sampling.order import Ref, walk
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


def whole_walk(counts: Sequence[int]) -> Iterator[Ref]:
    """All samples in the stored order."""
    return itertools.chain.from_iterable(walk(counts, 0, 1, 64))


def samples(index: Index) -> list[dict[str, Any]]:
    reader = ShardReader(index)
    found = [reader.read(ref) for ref in whole_walk(index.counts)]
    reader.close()
    return found


def shard(proxy: Proxy, number: int = 0) -> Path:
    """Where nginx has it."""
    return proxy.nginx.folder / "www" / f"s-{number:06d}.tar"


def all_of(proxy: Proxy) -> str:
    return f"{proxy.url}/s-{{000000..{SHARDS - 1:06d}}}.tar"


def kept(tmp_path: Path, *hidden: str) -> list[Path]:
    """Whole shards in the cache; with `hidden`, of the files that begin so."""
    every = [path for path in (tmp_path / "cache" / FOLDER).iterdir() if path.suffix != ".idx"]
    return [path for path in every if path.name.startswith(hidden or tuple("0123456789abcdef"))]
