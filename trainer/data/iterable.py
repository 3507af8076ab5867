"""Iterates over batches repeatedly, with random numbers that a resume reproduces."""

import hashlib
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainer.data.batch import Micro, Split, count_samples
from trainer.data.limit import FirstOf
from trainer.data.stream import Batches, Stream
from trainer.data.torch_loader import batch_size_of, begin_pass
from trainer.errors import DataError
from trainer.log import log
from trainer.rng import GOLDEN, MASK, seed_all

MOST = 1 << 16  # the most values of a tensor that `digest` reads


def replay(
    source: Iterable[Any], weight: Callable[[Any], int] | None, key: int, endless: bool, given: object = None
) -> Generator[Micro]:
    """Yield the batches of `source`; a replay draws the same random numbers.

    `random` and NumPy are seeded at the start, because the trainer does not use them between batches. Torch is seeded
    before each batch, because training uses it.

    Args:
        weight: Counts the items of a batch; None: count its samples.
        given: The recipe's own iterable, if `source` is this rank's part of it.
    """
    seed_all(key)
    count, given = weight or count_samples, source if given is None else given
    for walked in itertools.count():
        batch = None
        begin_pass(source.source if isinstance(source, FirstOf) else source, walked, endless)
        for batch in source:
            try:
                items = count(batch)
            except DataError as error:
                raise DataError(f"{error}{'' if weight else way_of_samples(given)}") from None
            yield Micro(batch, items, [], [])
            key = key + GOLDEN & MASK
            torch.default_generator.manual_seed(key)
        if not endless:
            return
        if batch is None:
            raise DataError(f"recipe.data('train'): {why_no_batch(source, walked)}")


def why_no_batch(source: Iterable[Any], walked: int) -> str:
    """Explain why a pass over training data yielded no batch, and how to fix it, after `walked` non-empty passes."""
    source = source.source if isinstance(source, FirstOf) else source
    if not walked and isinstance(source, Batches):
        few = f"stream has fewer samples on this rank than micro_batch={source.micro}"
        return f"a pass of the {few}; give a smaller batch, or more samples"
    if not walked and isinstance(source, DataLoader):
        sampler: Any = source.batch_sampler
        if isinstance(sampler, BatchSampler) and sampler.drop_last:
            few = f"drop_last=True has fewer samples on this rank than batch_size={sampler.batch_size}"
            return f"a pass of the DataLoader with {few}; give a smaller batch_size and batch, or more samples"
        if not isinstance(source.dataset, IterableDataset):
            return "a pass of the DataLoader has no sample on this rank; give more samples"
    return "the iterable gave no batch; a generator must not end"


def refuse_other_size(source: object, batch: Any, split: Split) -> None:
    """Refuse a batch whose number of samples differs from a micro-batch of `split`, from which rates are computed.

    A batch without a tensor to count samples by passes. So does one from a DataLoader that draws as many samples,
    because its `collate_fn` may leave some out.

    Raises:
        DataError: The number of samples differs.
    """
    inner = source.source if isinstance(source, FirstOf) else source
    try:
        samples = count_samples(batch)
    except DataError:
        return
    if samples != split.micro and batch_size_of(inner) != split.micro:
        cut = f"batch={split.samples}, {split.world} rank(s), accumulate={split.accumulate}"
        raise DataError(
            f"recipe.data('train'): a batch has {samples} samples, and this run's micro-batch is {split.micro} ({cut})"
            f"; yield batches of {split.micro}, or give micro_batch={samples}, "
            f"accumulate={split.accumulate} and batch={samples * split.world * split.accumulate}"
            f"{way_of_samples(source)}"
        )


def way_of_samples(source: Any) -> str:
    """Return a hint on how to yield samples instead of batches; empty if `source` is known to yield either."""
    source = source.source if isinstance(source, FirstOf) else source
    if isinstance(source, list | tuple):
        return ". For a list of samples, return a Dataset"
    if isinstance(source, DataLoader) and source.batch_sampler is None:
        return ". The DataLoader has batch_size=None, so an item of its data set is a batch; give it a batch_size"
    known = isinstance(source, DataLoader | Stream) or hasattr(source, "yields_samples")
    return "" if known else ". If the iterable yields samples, give it the attribute yields_samples = True"


def warn_of_same_batches(batch: Any, data_rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Warn if ranks have the same first batch, because they would all train on the same data. A collective."""
    found: dict[int, str] = dict(gather([data_rank, digest(batch)]))
    if len(set(found.values())) < len(found):
        log.warning(
            "recipe.data('train'): ranks have the same first batch, so they repeat each other's work; return a "
            "Dataset, which Echelon splits, or yield other batches on each torch.distributed.get_rank()"
        )


def digest(batch: Any) -> str:
    """Return a hash of the values in `batch`. An object whose text lacks its value hashes differently on each rank."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            some = value.detach().flatten()[:MOST].cpu().contiguous()
            hashed.update(f"{value.dtype} {tuple(value.shape)}".encode() + some.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            add(list(value.items()))
        elif isinstance(value, list | tuple):
            hashed.update(str(len(value)).encode())
            for item in value:
                add(item)
        else:
            hashed.update(repr(value).encode())

    add(batch)
    return hashed.hexdigest()


def preserve_rng_state(micros: Iterator[Micro]) -> Generator[Micro]:
    """Yield `micros`, then restore the states of `random` and NumPy, which a training iterable may use."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield from micros
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
