"""Loaders without a trainer, and the batches that a step or a trainer gives out and does not keep."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Sampler, default_collate

from trainer.callback import Callback
from trainer.config.options import DataOptions
from trainer.data.batch import Split, Step
from trainer.data.loader import Loader
from trainer.data.opening import open_source
from trainer.data.source import Samples

SEED, BATCH, ACCUMULATE = 7, 12, 2  # of `small_loader`; the batch is a rank's


def open_loader(
    recipe: Any,
    rank: int = 0,
    world: int = 1,
    *,
    options: DataOptions,
    batch: int = 12,
    accumulate: int = 1,
    seed: int = 7,
    timeout_s: float = 600.0,
) -> Loader:
    source, validation = (open_source(recipe, split, seed, options, timeout_s) for split in ("train", "val"))
    assert source is not None
    return Loader(
        source, source.order(options.shuffle_shards, options.shuffle_window) if isinstance(source, Samples) else None,
        Split(batch, world, accumulate), options, validation=validation, rank=rank, seed=seed, timeout_s=timeout_s,
        collate=getattr(recipe, "collate", default_collate), weight=getattr(recipe, "weight", None),
    )  # fmt: skip


class Whole(NamedTuple):
    """A step with its batches."""

    batches: list[Any]
    weights: list[int]
    refs: list[Any]
    bad: list[Any]


def whole(step: Step) -> Whole:
    return Whole([batch for batch, _ in step], step.weights, step.refs, step.bad)


class KeepBatches(Callback):
    """Keeps the batches of the last step."""

    def wrap_forward_backward(self, trainer: Any, run: Any) -> Any:
        def keep(data: Step, total: Any) -> Any:
            self.batches: list[Any] = []
            return run(Kept(data, self.batches), total)

        return keep


class Kept:
    """A step whose batches are added to a list as they are given out."""

    reduces = True

    def __init__(self, step: Step, batches: list[Any]) -> None:
        self.step, self.batches, self.weights = step, batches, step.weights

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for batch, weight in self.step:
            self.batches.append(batch)
            yield batch, weight


def small_loader(recipe: Any, rank: int, world: int, timeout_s: float = 600, **data: int) -> Loader:
    options = DataOptions(**{"shuffle_shards": 5, "shuffle_window": 4, **data})
    return open_loader(
        recipe, rank, world, options=options, batch=BATCH * world, accumulate=ACCUMULATE, seed=SEED, timeout_s=timeout_s
    )


def steps(loader: Loader, start: int, count: int) -> list[Whole]:
    stream = loader.train(start)
    found = [whole(step) for step in itertools.islice(stream, count)]
    stream.close()  # ends its workers
    return found


class EpochOrder(Sampler[int]):
    """A sampler with another order in each epoch, which a bare loop sets by `set_epoch`."""

    epoch = 0

    def __init__(self, length: int, order: Callable[[int], list[int]]) -> None:
        self.length, self.order = length, order

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch))
