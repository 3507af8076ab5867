"""Splits a torch DataLoader's samples over ranks, and sets the epochs of its samplers."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer.errors import ConfigError
from trainer.rng import GOLDEN, MASK

DRAWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class RankSampler(Sampler[Any]):
    """Every `world`-th index of a sampler in `DRAWN`, starting at index `rank`. All ranks draw the same indices."""

    def __init__(self, sampler: Any, rank: int, world: int, key: int) -> None:
        self.sampler, self.rank, self.world, self.key = sampler, rank, world, key
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self.key + self.epoch * GOLDEN & MASK)
        drawn = iter(self.sampler)
        first = list(itertools.islice(drawn, 1))  # torch's samplers use its generator only before the first index
        torch.default_generator.set_state(state)
        return itertools.islice(itertools.chain(first, drawn), self.rank, None, self.world)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.sampler), self.world))


def part_of(
    source: Iterable[Any], rank: int, world: int, key: int, log: Callable[[str, int, int], object]
) -> Iterable[Any]:
    """Return this rank's part of a DataLoader whose sampler is torch's own; any other iterable unchanged.

    Args:
        key: Seeds a sampler without a generator; equal on all ranks.
        log: Called with a message and its arguments if the ranks share the samples.
    """
    if world == 1 or not isinstance(source, DataLoader) or not is_drawn(source):
        return source
    log("recipe.data: %d ranks share the %d samples of a DataLoader", world, len(source.sampler))  # pyright: ignore[reportArgumentType] it has a sampler
    return with_sampler(source, RankSampler(source.sampler, rank, world, key))


def is_drawn(loader: DataLoader[Any]) -> bool:
    """Return whether one of torch's own samplers draws the samples, and the loader itself makes batches of them."""
    batches = loader.batch_sampler
    standard = batches is None or (type(batches) is BatchSampler and batches.sampler is loader.sampler)
    return standard and type(loader.sampler) in DRAWN


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a DataLoader, which has no custom batch sampler, with another sampler."""
    copied = copy_loader(loader)
    batches = None if loader.batch_sampler is None else BatchSampler(sampler, loader.batch_size, loader.drop_last)  # pyright: ignore[reportArgumentType] it has a size
    vars(copied).update(sampler=sampler, batch_sampler=batches)  # a DataLoader forbids plain assignments
    return copied


def copy_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy that starts persistent workers of its own."""
    copied: Any = copy.copy(loader)
    copied._iterator = None
    return copied


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    parts = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts if part is not None}.values())


class FixedEpoch:
    """Replaces an object's `set_epoch` while a run trains, because the samples of a pass are drawn ahead."""

    def __init__(self, set_epoch: Callable[[int], Any], number: int, kind: str) -> None:
        self.set_epoch, self.number, self.kind = set_epoch, number, kind

    def __call__(self, epoch: int) -> None:
        if epoch != self.number:
            raise ConfigError(
                f"recipe.data('train'): {self.kind}.set_epoch({epoch}) was called in pass {self.number}, whose samples "
                f"are drawn already; leave it out, since Echelon calls set_epoch({self.number}) before the pass"
            )


def with_epoch(source: Any) -> list[Any]:
    """Return an iterable, or a DataLoader's samplers, if they have a method `set_epoch`."""
    parts = samplers_of(source) if isinstance(source, DataLoader) else [source]
    return [part for part in parts if hasattr(part, "set_epoch")]


def begin_pass(source: Any, number: int, trains: bool) -> None:
    """Set the epoch of an iterable or of a DataLoader's samplers. While it `trains`, user code can't set another."""
    for part in with_epoch(source):
        set_epoch = part.set_epoch.set_epoch if isinstance(part.set_epoch, FixedEpoch) else part.set_epoch
        set_epoch(number)
        if trains:
            with suppress(AttributeError):  # it has slots
                part.set_epoch = FixedEpoch(set_epoch, number, type(part).__name__)


def end_passes(source: Any) -> None:
    """Let user code set epochs again, also on a wrapped loader."""
    for part in (*with_epoch(source), *with_epoch(getattr(source, "loader", None))):
        if isinstance(getattr(part, "__dict__", {}).get("set_epoch"), FixedEpoch):
            del part.set_epoch


def refuse_other_replicas(source: Any, split: str, rank: int, ranks: int) -> None:
    """Refuse a DistributedSampler made for other ranks, since samples would repeat or be missing."""
    loader = getattr(source, "given", None)
    for sampler in samplers_of(loader) if isinstance(loader, DataLoader) else ():
        if isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank) != (ranks, rank):
            raise ConfigError(
                f"recipe.data({split!r}): DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) "
                f"on rank {rank} of {ranks}; return the DataLoader without it, whose samples the ranks share"
            )


def batches_in(source: Any, ranks: int) -> int | None:
    """Return the number of batches per pass on the rank with the most, None if the iterable has no length.

    An iterable with a method `batches_in(ranks)` also needs an attribute `batch_size`.
    """
    if hasattr(source, "batches_in"):
        return source.batches_in(ranks)
    try:
        if ranks > 1 and isinstance(source, DataLoader) and is_drawn(source):
            return len(with_sampler(source, range(0, len(source.sampler), ranks)))  # pyright: ignore[reportArgumentType]
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def batch_size_of(source: Any) -> int | None:
    """Return the batch size of a DataLoader or of an iterable with `batches_in`, None if unknown."""
    if not isinstance(source, DataLoader) and not hasattr(source, "batches_in"):
        return None
    size = getattr(source, "batch_size", None) or getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def end_workers(source: Any) -> None:
    """End a DataLoader's persistent workers."""
    iterator = getattr(source, "_iterator", None) if isinstance(source, DataLoader) else None
    if iterator is not None:
        iterator._shutdown_workers()
        source._iterator = None  # pyright: ignore[reportAttributeAccessIssue] torch's own sets it
