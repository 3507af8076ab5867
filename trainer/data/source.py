"""What a recipe's `data` may be, made one thing: samples by reference, or batches as they come."""

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch.utils.data import Dataset, IterableDataset

from trainer.data.index import Index, find_shards
from trainer.data.order import Ref, mix
from trainer.data.read import ShardReader
from trainer.errors import DataError
from trainer.run import log

VIRTUAL_SHARDS = 65536  # a map-style dataset is cut into at most so many, so that shuffling moves single samples


class Samples:
    """Samples by reference: all that a data worker holds, and stateless.

    Before each sample, `random`, NumPy and torch are seeded from (seed, epoch, sample): neither the number of workers
    nor that of ranks changes an augmentation.
    """

    def __init__(
        self,
        read: "ReadShard | ReadMap",
        counts: list[int],
        fingerprint: str,
        transform: Callable[[Any, Generator], Any] | None,
        seed: int,
    ) -> None:
        self.read, self.counts, self.fingerprint, self.transform, self.seed = read, counts, fingerprint, transform, seed
        self.bases = np.concatenate([[0], np.cumsum(counts)]).tolist()

    def __len__(self) -> int:
        return self.bases[-1]

    def __getitems__(self, refs: list[Ref]) -> list[Any]:
        self.read.prefetch(refs)
        return [self[ref] for ref in refs]

    def __getitem__(self, ref: Ref) -> Any:
        sample = self.bases[ref.shard] + ref.offset
        key = mix(self.seed, 3, ref.epoch, sample)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        torch.default_generator.manual_seed(key)
        value = self.read(ref, sample)
        return value if self.transform is None else self.transform(value, Generator(Philox(key)))


class ReadShard:
    def __init__(self, index: Index) -> None:
        self.reader = ShardReader(index)

    def __call__(self, ref: Ref, sample: int) -> Any:
        return self.reader.read(ref)

    def prefetch(self, refs: list[Ref]) -> None:
        self.reader.prefetch(refs)


class ReadMap:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, ref: Ref, sample: int) -> Any:
        return self.dataset[sample]

    def prefetch(self, refs: list[Ref]) -> None:
        """A map-style dataset has no such thing."""


def open_source(recipe: Any, split: str, seed: int) -> Samples | Iterable[Any] | None:
    """The recipe's data of `split`; None where it has none (validation only)."""
    data = recipe.data(split)
    transform = getattr(recipe, "transform", None)
    if data is None:
        return None
    if _names_shards(data):
        index = Index.open(find_shards(data), Progress())
        return Samples(ReadShard(index), index.counts, index.fingerprint, transform, seed)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        size = len(data)  # pyright: ignore[reportArgumentType] a map-style Dataset has a length
        if size == 0:
            raise DataError(f"recipe.data({split!r}): the dataset is empty")
        per_shard = -(-size // VIRTUAL_SHARDS)
        counts = [min(per_shard, size - start) for start in range(0, size, per_shard)]
        name = getattr(data, "fingerprint", f"{type(data).__module__}.{type(data).__qualname__}")
        return Samples(ReadMap(data), counts, hashlib.sha256(f"{name} {size}".encode()).hexdigest(), transform, seed)
    return data


class Progress:
    """A log line now and then while shards are indexed."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def __call__(self, shard: str, done: int, total: int) -> None:
        if time.monotonic() - self.told > 5:
            self.told = time.monotonic()
            log.info("indexing %s: %d of %d MB", shard, done >> 20, total >> 20)


def _names_shards(data: Any) -> bool:
    return isinstance(data, str | Path) or (isinstance(data, list) and all(isinstance(d, str | Path) for d in data))
