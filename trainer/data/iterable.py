"""Iterables of batches: walked again and again, replayed to the bit, and no trouble to each other."""

import random
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from trainer.data.batch import Micro, Split, count_samples
from trainer.errors import DataError
from trainer.rng import GOLDEN, MASK, seed_all


def replay(source: Iterable[Any], weight: Callable[[Any], int], key: int, endless: bool) -> Generator[Micro]:
    """Yield batches as they come; a replay draws the same random numbers.

    `random` and NumPy are seeded at the start, since nothing of ours draws from them between batches. Before each
    batch, torch is seeded, since training draws from it.
    """
    seed_all(key)
    while True:
        batch = None
        for batch in source:
            yield Micro(batch, weight(batch), [], [])
            key = key + GOLDEN & MASK
            torch.default_generator.manual_seed(key)
        if not endless:
            return
        if batch is None:
            raise DataError("recipe.data('train'): the iterable gave no batch; a generator must not end")


def refuse_other_size(batch: Any, split: Split) -> None:
    """Refuse a batch that is no micro-batch of `split`, by which samples and all rates are counted.

    A batch without a tensor to count by passes.

    Raises:
        DataError: for another number of samples.
    """
    try:
        samples = count_samples(batch)
    except (DataError, IndexError):
        return
    if samples != split.micro:
        cut = f"batch={split.samples}, {split.world} rank(s), accumulate={split.accumulate}"
        raise DataError(
            f"recipe.data('train'): a batch has {samples} samples, and this run's micro-batch is {split.micro} ({cut})"
            f"; yield batches of {split.micro}, or give micro_batch={samples}, "
            f"accumulate={split.accumulate} and batch={samples * split.world * split.accumulate}"
        )


def refuse_same_batches(source: Any) -> None:
    """Refuse a DataLoader that gives every rank the same batches: over a map-style data set, in an order of its own.

    Raises:
        DataError: with the way out.
    """
    sampler = source.sampler if isinstance(source, DataLoader) else None
    # Without a generator of its own, the order is drawn from torch's, and each rank has another.
    shuffled = isinstance(sampler, RandomSampler) and sampler.generator is None
    if isinstance(sampler, SequentialSampler | RandomSampler) and not shuffled:
        kind = type(source.dataset).__name__
        raise DataError(
            f"recipe.data('train'): a DataLoader over {kind} gives every rank the same batches; return the data set "
            "itself, whose samples are shared out, or give the DataLoader a DistributedSampler"
        )


def undisturbing(micros: Iterator[Micro]) -> Generator[Micro]:
    """`micros`, and afterwards `random` and NumPy as they were: a training iterable may draw from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield from micros
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
