"""The data of a LightningDataModule: the samples of its loaders in Echelon's order, or the loaders' own batches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trainer.data.torch_loader import batch_size_of, batches_in, begin_pass, is_drawn, part_of, with_sampler
from trainer.errors import ConfigError
from trainer.log import log

OF_WORKERS = 2  # the `prefetch_factor` of a DataLoader with workers that is given none
METHODS = {split: f"{split}_dataloader" for split in ("train", "val", "predict")}


class Samples(Dataset[Any]):
    """The samples of a loader, each with the function that makes batches of them."""

    def __init__(self, loader: DataLoader[Any], split: str) -> None:
        self.dataset: Any = loader.dataset
        self.worker_dataset = self.dataset  # that `get_worker_info` has
        self.collate = loader.collate_fn
        self.validation_batch = None if split == "train" else loader.batch_size  # not all metrics are additive
        self.worker_init_fn = loader.worker_init_fn if loader.num_workers else None  # data workers call it
        name = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"
        self.fingerprint = getattr(self.dataset, "fingerprint", name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Callable[[list[Any]], Any], Any]:
        return self.collate, self.dataset[i]


class Batches:
    """The batches of a loader of this rank, pass after pass, as Lightning's Trainer gives them.

    On several ranks of a training a DistributedSampler takes the place of the loader's, with the run's seed. As
    Lightning's, it shuffles whether the loader does or not. Other samplers of torch's are split as they draw.
    """

    yields_samples = False

    def __init__(self, loader: DataLoader[Any], split: str, seed: Callable[[], int]) -> None:
        self.loader, self.split, self.seed, self.epoch = loader, split, seed, 0
        self.batch_size = batch_size_of(loader)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        loader, ranks = self.loader, dist.get_world_size() if dist.is_initialized() else 1
        refuse_ranks(loader, self.split, ranks)
        if self.splits(ranks):
            own = DistributedSampler(loader.dataset, seed=self.seed())
            own.set_epoch(self.epoch)
            return iter(with_sampler(loader, own))
        if ranks > 1:
            loader: Any = part_of(loader, dist.get_rank(), ranks, self.seed(), lambda *_: None)
        begin_pass(loader, self.epoch, self.split == "train")
        return iter(loader)

    def splits(self, ranks: int) -> bool:
        """Return whether a DistributedSampler splits the samples over the ranks."""
        return ranks > 1 and self.split == "train" and takes_all(self.loader)

    def batches_in(self, ranks: int) -> int | None:
        """Return the batches of a pass on a rank; None if they can't be counted."""
        if self.splits(ranks):
            return batches_in(with_sampler(self.loader, range(0, len(self.loader.dataset), ranks)), 1)  # pyright: ignore[reportArgumentType] has a length
        return batches_in(self.loader, ranks)


def is_batched(loader: DataLoader[Any]) -> bool:
    """Return whether the loader itself makes batches of what its sampler draws."""
    batches = loader.batch_sampler
    return type(batches) is BatchSampler and batches.sampler is loader.sampler


def takes_all(loader: DataLoader[Any]) -> bool:
    """Return whether a pass has each sample of the data set once, in their order or shuffled."""
    sampler: Any = loader.sampler
    if not is_batched(loader):
        return False
    if type(sampler) is DistributedSampler:  # each rank has its part; Echelon splits the samples, too
        return sampler.dataset is loader.dataset
    if type(sampler) is RandomSampler:
        return sampler.data_source is loader.dataset and not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler and sampler.data_source is loader.dataset


def refuse_ranks(loader: Any, split: str, ranks: int) -> None:
    """Raise ConfigError if a loader gives each of several ranks the same samples, or is for another number of ranks."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != ranks:
            raise ConfigError(
                f"{METHODS[split]}(): DistributedSampler(num_replicas={sampler.num_replicas}): there are {ranks} "
                "rank(s); leave the sampler out, since Echelon splits the samples over the ranks"
            )
    elif ranks > 1 and not is_drawn(loader):
        kind = type(sampler if is_batched(loader) else loader.batch_sampler).__name__
        raise ConfigError(
            f"{METHODS[split]}(): {kind} has an order of its own, which Echelon can't split over {ranks} ranks; use a "
            "DistributedSampler, one of torch's samplers, or one rank"
        )


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
    if isinstance(found, list | tuple) and len(found) < 2:
        found = found[0] if found else None
    if isinstance(found, list | tuple | dict) or type(found).__name__ == "CombinedLoader":
        raise ConfigError(f"{method}(): returned several loaders, and Echelon takes one; return one")
    return found


def samples_or_batches(loader: Any, split: str, batches: bool, seed: Callable[[], int]) -> Any:
    """Return the samples of a loader; its batches if these are asked for, or are not of all samples.

    Raises:
        ConfigError: The training loader draws samples in an order of its own.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset) or (batches and split == "train"):
        return Batches(loader, split, seed)
    usual = takes_all(loader)
    if split != "train":
        return Samples(loader, split) if usual and not loader.drop_last else Batches(loader, split, seed)
    if not usual:
        kind = type(loader.sampler if is_batched(loader) else loader.batch_sampler).__name__
        raise ConfigError(
            f"{METHODS[split]}(): {kind} has an order of its own; give recipe.batches=true to take the loader's batches"
        )
    log.info(
        "%s(): %d samples in Echelon's order, of which a step takes `batch`; not used: %s", METHODS[split],
        len(loader.dataset), ", ".join(f"{name}={getattr(loader, name)}" for name in not_used(loader)),  # pyright: ignore[reportArgumentType] not iterable
    )  # fmt: skip
    return Samples(loader, split)


def not_used(loader: DataLoader[Any]) -> list[str]:
    """Return the arguments of a loader that its samples do not take with them."""
    defaults: Any = DataLoader([0])  # pyright: ignore[reportArgumentType] a list is a data set
    names = ("drop_last", "generator", "num_workers", "pin_memory", "pin_memory_device", "timeout")
    names += ("persistent_workers", "in_order", "multiprocessing_context", "prefetch_factor")
    found = [name for name in names if getattr(loader, name) != getattr(defaults, name)]
    if loader.num_workers and loader.prefetch_factor == OF_WORKERS:  # torch's own number
        found.remove("prefetch_factor")
    return ["batch_size", *found]


def collate(samples: list[tuple[Callable[[list[Any]], Any], Any]]) -> Any:
    """Return the batch that the samples' own loader makes of them."""
    return samples[0][0]([sample for _, sample in samples])
