"""A torch DataLoader as data: its length, its passes, and each rank's part of its samples."""

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


class Part(Sampler[Any]):
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
    source: Iterable[Any], rank: int, world: int, key: int, tell: Callable[[str, int, int], object]
) -> Iterable[Any]:
    """Return this rank's part of a DataLoader whose sampler is torch's own; any other iterable unchanged.

    Args:
        key: Seeds a sampler without a generator; equal on all ranks.
        tell: Logs that the ranks share the samples.
    """
    if world == 1 or not isinstance(source, DataLoader) or not is_drawn(source):
        return source
    tell("recipe.data: %d ranks share the %d samples of a DataLoader", world, len(source.sampler))  # pyright: ignore[reportArgumentType] it has a sampler
    return with_sampler(source, Part(source.sampler, rank, world, key))


def is_drawn(loader: DataLoader[Any]) -> bool:
    """Return whether one of torch's own samplers draws the samples, and the loader itself makes batches of them."""
    batches = loader.batch_sampler
    own = batches is None or (type(batches) is BatchSampler and batches.sampler is loader.sampler)
    return own and type(loader.sampler) in DRAWN


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a DataLoader, one without a custom batch sampler, with another sampler."""
    own: Any = again(loader)
    batches = None if loader.batch_sampler is None else BatchSampler(sampler, loader.batch_size, loader.drop_last)  # pyright: ignore[reportArgumentType] it has a size
    vars(own).update(sampler=sampler, batch_sampler=batches)  # a DataLoader forbids plain assignments
    return own


def again(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Copy a DataLoader with persistent workers, so that the copy has its own; return any other unchanged."""
    own: Any = copy.copy(loader)
    own._iterator = None
    return own


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the sampler and the batch sampler of a loader."""
    parts = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts if part is not None}.values())


class OwnEpoch:
    """Replaces an object's `set_epoch` while a run trains, because the samples of a pass are drawn ahead."""

    def __init__(self, set_epoch: Callable[[int], Any], number: int, kind: str) -> None:
        self.set_epoch, self.number, self.kind = set_epoch, number, kind

    def __call__(self, epoch: int) -> None:
        """Do nothing, because the epoch is already set.

        Raises:
            ConfigError: It differs from the current epoch.
        """
        if epoch != self.number:
            raise ConfigError(
                f"recipe.data('train'): {self.kind}.set_epoch({epoch}) was called in pass {self.number}, whose samples "
                f"are drawn already; leave it out, since Echelon calls set_epoch({self.number}) before the pass"
            )


def with_epoch(source: Any) -> list[Any]:
    """Return the objects with a method `set_epoch`: an iterable, or a DataLoader's samplers."""
    parts = samplers_of(source) if isinstance(source, DataLoader) else [source]
    return [part for part in parts if hasattr(part, "set_epoch")]


def begin_pass(source: Any, number: int, trains: bool) -> None:
    """Call `set_epoch` on an iterable, or on a DataLoader's samplers, before a pass.

    Args:
        trains: It is a training pass, during which user code may not set another epoch.
    """
    for part in with_epoch(source):
        given = part.set_epoch
        set_epoch = given.set_epoch if isinstance(given, OwnEpoch) else given
        set_epoch(number)
        if trains:
            with suppress(AttributeError):  # it has slots
                part.set_epoch = OwnEpoch(set_epoch, number, type(part).__name__)


def end_passes(source: Any) -> None:
    """Let user code set epochs again, also on a wrapped loader."""
    for part in (*with_epoch(source), *with_epoch(getattr(source, "loader", None))):
        if isinstance(getattr(part, "__dict__", {}).get("set_epoch"), OwnEpoch):
            del part.set_epoch


def refuse_other_replicas(source: Any, split: str, rank: int, ranks: int) -> None:
    """Refuse a DataLoader whose DistributedSampler was made for other ranks, since samples would repeat or be missing.

    Raises:
        ConfigError: It is for another number of ranks, or for another rank than this one.
    """
    loader = getattr(source, "given", None)
    for sampler in samplers_of(loader) if isinstance(loader, DataLoader) else ():
        own = isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank)
        if own and own != (ranks, rank):
            raise ConfigError(
                f"recipe.data({split!r}): DistributedSampler(num_replicas={own[0]}, rank={own[1]}) on rank {rank} of "
                f"{ranks}; return the DataLoader without it, whose samples the ranks share"
            )


def batches_in(source: Any, ranks: int) -> int | None:
    """Return the number of batches per pass on the rank with the most; None if the iterable has no length.

    An iterable may have a method `batches_in(ranks)`; it then needs an attribute `batch_size`.
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
    """Return the batch size of a DataLoader, or of an iterable with `batches_in`; None if unknown."""
    if not isinstance(source, DataLoader) and not hasattr(source, "batches_in"):
        return None
    size = getattr(source, "batch_size", None) or getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def end_workers(source: Any) -> None:
    """End the persistent workers of a DataLoader."""
    iterator = getattr(source, "_iterator", None) if isinstance(source, DataLoader) else None
    if iterator is not None:
        iterator._shutdown_workers()
        source._iterator = None  # pyright: ignore[reportAttributeAccessIssue] torch's own sets it
