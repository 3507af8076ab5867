"""Iterates over batches again and again, with random numbers that a resume repeats bit for bit."""

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
    """Yield the batches of `source`; a replay draws the same random numbers.

    `random` and NumPy are seeded at the start, since the trainer draws nothing from them between batches. Before each
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
    """Refuse a batch that has another number of samples than a micro-batch of `split`: rates are computed from that.

    A batch without a tensor to count samples by passes.

    Raises:
        DataError: The number of samples differs.
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
    """Refuse a DataLoader over a map-style dataset whose sampler gives every rank the same batches.

    Raises:
        DataError: The sampler is sequential, or random with a generator of its own.
    """
    sampler = source.sampler if isinstance(source, DataLoader) else None
    # Without a generator of its own, a sampler draws from torch's, which is seeded differently on each rank.
    shuffled = isinstance(sampler, RandomSampler) and sampler.generator is None
    if isinstance(sampler, SequentialSampler | RandomSampler) and not shuffled:
        kind = type(source.dataset).__name__
        raise DataError(
            f"recipe.data('train'): a DataLoader over {kind} gives every rank the same batches; return the dataset "
            "itself, which Echelon splits over the ranks, or give the DataLoader a DistributedSampler"
        )


def preserve_rng_state(micros: Iterator[Micro]) -> Generator[Micro]:
    """Yield `micros`, then restore the states of `random` and NumPy: a training iterable may draw from these."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield from micros
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
