"""Iterates over batches repeatedly, with random numbers that a resume reproduces."""

import hashlib
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainer.data.batch import Micro, Split, count_samples
from trainer.data.stream import Batches, Stream
from trainer.data.torch_loader import batch_size_of, batches_in, begin_pass
from trainer.errors import ConfigError, DataError
from trainer.log import log
from trainer.rng import GOLDEN, MASK, seed_all

MAX_VALUES = 1 << 16  # values of a tensor that `digest` reads


@dataclass(frozen=True)
class Iterated:
    """An iterable of batches that a recipe has returned, such as a DataLoader, or a stream of samples."""

    given: Any  # the iterable, or a `Stream` of it
    most: int | None = None  # batches of each pass on each rank; None: all
    size: ClassVar[int] = 0  # the number of samples, which is unknown

    @property
    def fingerprint(self) -> str:
        """The limit and the shuffle buffer only, because an iterable's content is unknown."""
        buffer = self.given.buffer if isinstance(self.given, Stream) else 0
        kind = f"iterable with shuffle_buffer={buffer}" if buffer else "iterable"
        return kind if self.most is None else f"{kind} first {self.most}"

    @property
    def batch_size(self) -> int | None:
        return batch_size_of(self.given)

    def order(self, lanes: int, block: int) -> None:
        """Return None: the iterable has its own order."""

    def batches_in(self, ranks: int) -> int | None:
        """Return the number of batches per pass on the rank with the most, None if the iterable has no length."""
        count = batches_in(self.given, ranks)
        return count if count is None or self.most is None else min(count, self.most)

    def first(self, batches: int, batch: int, micros: int, key: str) -> "Iterated":
        """Return the first batches of each pass, of which a rank needs `micros` for one of the run's.

        Args:
            key: The setting, for errors.
        """
        if is_used_up(self.given):
            raise ConfigError(
                f"{key}={batches}: recipe.data('train') is a {type(self.given).__name__}, which can be iterated only "
                "once; give trainer.max_steps instead, or return an object whose __iter__ starts over"
            )
        return Iterated(self.given, batches * micros)

    def close(self) -> None:
        """Do nothing: the iterable belongs to the recipe."""


def is_used_up(data: Any) -> bool:
    """Return whether an iterable can be iterated only once, because it always returns the same iterator."""
    data = data.samples if isinstance(data, Stream) else data
    fresh = isinstance(data, DataLoader | IterableDataset | Sequence)  # an iterator of these may start processes
    return isinstance(data, Iterator) or (not fresh and iter(data) is iter(data))


def replay(
    source: Iterable[Any], weight: Callable[[Any], int] | None, key: int, endless: bool, given: Iterated
) -> Generator[Micro]:
    """Yield the batches of `source`, this rank's part of `given`. A replay draws the same random numbers.

    `random` and NumPy are seeded once, because the trainer does not use them between batches. Torch is seeded before
    each batch, because training uses it.

    Args:
        weight: Counts the items of a batch; None: count its samples.
    """
    seed_all(key)
    count = weight or count_samples
    for epoch in itertools.count():
        batch = None
        begin_pass(source, epoch, endless)
        for batch in itertools.islice(source, given.most):
            try:
                items = count(batch)
            except DataError as error:
                raise DataError(f"{error}{'' if weight else hint_at_samples(given.given)}") from None
            yield Micro(batch, items, [], [])
            key = key + GOLDEN & MASK
            torch.default_generator.manual_seed(key)
        if not endless:
            return
        if batch is None:
            raise DataError(f"recipe.data('train'): {explain_no_batch(source, epoch)}")


def explain_no_batch(source: Iterable[Any], epoch: int) -> str:
    """Explain why a pass over training data yielded no batch, and how to fix it."""
    if not epoch and isinstance(source, Batches):
        few = f"stream has fewer samples on this rank than micro_batch={source.micro}"
        return f"a pass of the {few}; give a smaller batch, or more samples"
    if not epoch and isinstance(source, DataLoader):
        sampler: Any = source.batch_sampler
        if isinstance(sampler, BatchSampler) and sampler.drop_last:
            few = f"drop_last=True has fewer samples on this rank than batch_size={sampler.batch_size}"
            return f"a pass of the DataLoader with {few}; give a smaller batch_size and batch, or more samples"
        if not isinstance(source.dataset, IterableDataset):
            return "a pass of the DataLoader has no sample on this rank; give more samples"
    return "the iterable gave no batch; a generator must not end"


def refuse_other_size(source: Iterated, batch: Any, split: Split) -> None:
    """Refuse a batch that differs in size from a micro-batch of `split`, from which rates are computed.

    Batches pass if their samples can't be counted, or if their DataLoader has the right batch size: its `collate_fn`
    may leave samples out.
    """
    try:
        samples = count_samples(batch)
    except DataError:
        return
    if samples != split.micro and source.batch_size != split.micro:
        cut = f"batch={split.samples}, {split.world} rank(s), accumulate={split.accumulate}"
        raise DataError(
            f"recipe.data('train'): a batch has {samples} samples, and this run's micro-batch is {split.micro} ({cut})"
            f"; yield batches of {split.micro}, or give micro_batch={samples}, "
            f"accumulate={split.accumulate} and batch={samples * split.world * split.accumulate}"
            f"{hint_at_samples(source.given)}"
        )


def hint_at_samples(source: Any) -> str:
    """Return a hint for an iterable that may yield samples instead of batches; "" if it is known to yield batches."""
    if isinstance(source, list | tuple):
        return ". For a list of samples, return a Dataset"
    if isinstance(source, DataLoader) and source.batch_sampler is None:
        return ". The DataLoader has batch_size=None, so an item of its data set is a batch; give it a batch_size"
    known = isinstance(source, DataLoader | Stream) or hasattr(source, "yields_samples")
    return "" if known else ". If the iterable yields samples, give it the attribute yields_samples = True"


def warn_of_same_batches(batch: Any, data_rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Warn if ranks have the same first batch, as they would all train on the same data. A collective."""
    digests: dict[int, str] = dict(gather([data_rank, digest(batch)]))
    if len(set(digests.values())) < len(digests):
        log.warning(
            "recipe.data('train'): ranks have the same first batch, so they repeat each other's work; return a "
            "Dataset, which Echelon splits, or yield other batches on each torch.distributed.get_rank()"
        )


def digest(batch: Any) -> str:
    """Return a hash of the values in `batch`. Objects whose `repr` has their address differ on each rank."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            head = value.detach().flatten()[:MAX_VALUES].cpu().contiguous()
            hashed.update(f"{value.dtype} {tuple(value.shape)}".encode() + head.view(torch.uint8).numpy().tobytes())
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
    """Yield `micros`, then restore the states of `random` and NumPy, on which a training iterable may depend."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield from micros
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
