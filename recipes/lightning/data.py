"""The data of a LightningDataModule: the samples of its loaders in Echelon's order, or the loaders' own batches."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from trainer.errors import ConfigError
from trainer.log import log

METHODS = {split: f"{split}_dataloader" for split in ("train", "val", "predict")}


class Samples(Dataset[Any]):
    """The samples of a loader, each with the function that makes batches of them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset: Any = loader.dataset
        self.collate = loader.collate_fn
        name = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"
        self.fingerprint = getattr(self.dataset, "fingerprint", name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Callable[[list[Any]], Any], Any]:
        return self.collate, self.dataset[i]


class Batches:
    """The batches of a loader of this rank, epoch after epoch, as Lightning's Trainer gives them.

    On several ranks a DistributedSampler takes the place of the loader's, with the run's seed. As Lightning's, it
    shuffles whether the loader does or not.
    """

    yields_samples = False

    def __init__(self, loader: DataLoader[Any], seed: Callable[[], int]) -> None:
        self.loader, self.seed, self.epoch = loader, seed, 0

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        sampler = loader.sampler
        if self.splits(dist.get_world_size() if dist.is_initialized() else 1):
            own = DistributedSampler(loader.dataset, seed=self.seed())
            own.set_epoch(self.epoch)
            loader = DataLoader(
                loader.dataset, loader.batch_size, sampler=own, num_workers=loader.num_workers,
                collate_fn=loader.collate_fn, drop_last=loader.drop_last, worker_init_fn=loader.worker_init_fn,
            )  # fmt: skip
        elif hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)  # pyright: ignore[reportAttributeAccessIssue] it has one
        self.epoch += 1
        return iter(loader)

    def splits(self, ranks: int) -> bool:
        """Return whether a DistributedSampler splits the samples over the ranks."""
        return ranks > 1 and type(self.loader.sampler) in (SequentialSampler, RandomSampler)

    def count(self, ranks: int) -> float:
        """Return the batches of a rank in an epoch; infinity if they can't be counted."""
        loader: Any = self.loader
        if self.splits(ranks):
            samples = -(-len(loader.dataset) // ranks)
            return samples // loader.batch_size if loader.drop_last else -(-samples // loader.batch_size)
        try:
            return len(loader)
        except TypeError:
            return math.inf


def get_loader(source: Any, split: str) -> Any:
    """Return the loader of a datamodule or a module; None if it has none.

    Raises:
        ConfigError: There are several loaders.
    """
    if split not in METHODS:
        raise ConfigError(f"recipe=lightning: has no data for split={split}; give one of {', '.join(METHODS)}")
    method = METHODS[split]
    base = next((kind for kind in type(source).__mro__ if kind.__name__ == "DataHooks"), type(None))
    if getattr(type(source), method, None) in (None, getattr(base, method, None)) and method not in vars(source):
        return None
    found = getattr(source, method)()
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, list | tuple | dict) or type(found).__name__ == "CombinedLoader":
        raise ConfigError(f"{method}(): returned several loaders, and Echelon takes one; return one")
    return found


def samples_or_batches(loader: Any, split: str, batches: bool, seed: Callable[[], int]) -> Any:
    """Return the samples of a loader, or with `batches` its batches.

    Raises:
        ConfigError: The loader draws samples in an order of its own.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset) or (batches and split == "train"):
        return Batches(loader, seed)
    usual = type(loader.sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    if split == "train" and (not usual or loader.batch_size is None):
        kind = type(loader.sampler if loader.batch_size is not None else loader.batch_sampler).__name__
        raise ConfigError(
            f"{METHODS[split]}(): {kind} has an order of its own; give recipe.batches=true to take the loader's batches"
        )
    if split == "train":
        log.info(
            "%s(): %d samples in Echelon's order, of which a step takes `batch`; the loader's batch_size=%s, sampler "
            "and workers are not used", METHODS[split], len(loader.dataset), loader.batch_size,  # pyright: ignore[reportArgumentType] not iterable
        )  # fmt: skip
    return Samples(loader)


def collate(samples: list[tuple[Callable[[list[Any]], Any], Any]]) -> Any:
    """Return the batch that the samples' own loader makes of them."""
    return samples[0][0]([sample for _, sample in samples])
