"""Batches streams of samples, such as Hugging Face's streaming data sets, and splits them over the ranks."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from numpy.random import Generator
from torch.utils.data import default_collate

from trainer.data.shards.transforms import maker_of
from trainer.errors import ConfigError
from trainer.rng import SAMPLE, STREAM, keyed, mix

T = TypeVar("T")

STREAMING = ("datasets.iterable_dataset", "IterableDataset")


class Stream:
    """An iterable of samples, the same on every rank, that is restarted when it ends.

    The training process reads it without data workers. A resume reads again, and drops, what the run had read.

    Args:
        samples: Hugging Face's `IterableDataset`, or an iterable whose attribute `yields_samples` is true. If it has a
            method `set_epoch`, that is called before each pass over training data.
        transform: The recipe's transform.
        buffer: Samples that each rank holds in training, and from which it draws the next; 0: the given order.
    """

    def __init__(
        self, samples: Any, transform: Callable[[Any, Generator], Any] | None, seed: int, buffer: int = 0
    ) -> None:
        self.samples, self.transform, self.seed, self.buffer = samples, transform, seed, buffer

    def batches(
        self, micro: int, rank: int, world: int, collate: Callable[[list[Any]], Any], training: bool
    ) -> "Batches":
        """Return this rank's batches of `micro` samples; the last one may be smaller, except in training."""
        return Batches(self, micro, rank, world, collate, training)

    def part(self, epoch: int, rank: int, world: int, buffer: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield every `world`-th sample with its row, starting at sample `rank`.

        Hugging Face's data may skip whole files.
        """
        samples, first, every = self.samples, rank, world
        if world > 1 and is_hugging_face(samples):
            from datasets.distributed import split_dataset_by_node  # pyright: ignore[reportMissingImports]

            samples, first, every = split_dataset_by_node(samples, rank, world), 0, 1
        if hasattr(samples, "set_epoch"):
            samples.set_epoch(epoch)
        rows = enumerate(itertools.islice(iter(samples), first, None, every))
        for row, sample in shuffled(rows, buffer, self.seed, epoch, rank) if buffer else rows:
            key = mix(self.seed, SAMPLE, epoch, row * world + rank)
            with errors_at(f"sample {row} of rank {rank} in pass {epoch} of the stream"):
                made = sample if self.transform is None else self.transform(sample, keyed(key))
            yield row, made


def shuffled(items: Iterable[T], size: int, seed: int, epoch: int, rank: int) -> Iterator[T]:
    """Yield items in an order that depends on the numbers alone. Each is drawn from the next `size` that are left."""
    held = list[T]()
    rest = iter(items)
    for draw in itertools.count():
        held.extend(itertools.islice(rest, size - len(held)))
        if not held:
            return
        place = mix(seed, STREAM, epoch, rank, draw) % len(held)
        held[place], held[-1] = held[-1], held[place]
        yield held.pop()


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Attach the place in the data to an error of user code, for `errors.message`."""
    try:
        yield
    except Exception as error:
        error.place = f"on {place}"  # pyright: ignore[reportAttributeAccessIssue] read by name
        raise


class Batches:
    """One rank's batches of a stream. Each iteration is a pass over the data, in training with the next epoch."""

    def __init__(
        self, stream: Stream, micro: int, rank: int, world: int, collate: Callable[[list[Any]], Any], training: bool
    ) -> None:
        self.stream, self.micro, self.rank, self.world = stream, micro, rank, world
        self.collate, self.training, self.epoch = collate, training, 0

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        part = self.stream.part(epoch, self.rank, self.world, self.stream.buffer if self.training else 0)
        self.epoch += self.training
        while given := list(itertools.islice(part, self.micro)):
            if self.training and len(given) < self.micro:
                return
            rows, samples = zip(*given, strict=True)
            named = ", ".join(map(str, rows)) if self.stream.buffer else f"{rows[0]} to {rows[-1]}"
            with errors_at(f"samples {named} of rank {self.rank} in pass {epoch} of the stream"):
                batch = self._batch(list(samples), rows)
            yield batch

    def _batch(self, samples: list[Any], rows: Sequence[int]) -> Any:
        """Collate samples of these rows."""
        try:
            batch = self.collate(samples)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            if self.collate is not default_collate:
                raise
            for number, sample in zip(rows, samples, strict=True):
                if sample is None:
                    maker = maker_of(self.stream.transform)
                    raise ConfigError(f"recipe.data: sample {number} is None; return the sample from {maker}") from None
            fix = "give samples of one shape and of tensors, arrays or numbers, or give the recipe a `collate`"
            raise ConfigError(f"recipe.data: samples of a stream do not fit into a batch ({error}); {fix}") from None
        if batch is None:
            raise ConfigError("recipe.collate(): returned None; return the batch")
        return batch


def is_stream(data: Iterable[Any]) -> bool:
    """Return whether `data` yields samples instead of batches."""
    return is_hugging_face(data) or bool(getattr(data, "yields_samples", False))


def is_hugging_face(data: Any) -> bool:
    """Return whether `data` is a Hugging Face streaming data set, without importing the package."""
    return any((kind.__module__, kind.__name__) == STREAMING for kind in type(data).__mro__)
