"""Splits and weights the batches of one rank between two optimizer steps."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer.comm.phases import Phase, during
from trainer.data.bad_samples import Bad
from trainer.data.device_prefetch import Upload
from trainer.data.sampling.order import Ref, piece
from trainer.errors import DataError


@dataclass(frozen=True)
class Split:
    """The split of a step's samples over ranks, and then over micro-batches on each rank."""

    samples: int  # over all ranks
    shares: int | tuple[int, ...] = 1  # the number of ranks, if they have even shares; or the samples of each rank
    accumulate: int | tuple[int, ...] = 1  # micro-batches of all ranks or of each, which has at least as many samples

    def __post_init__(self) -> None:
        sizes = [self.share(rank) for rank in range(self.world)]
        assert sum(sizes) == self.samples, f"{self}: the shares do not add up"
        assert isinstance(self.accumulate, int) or len(self.accumulate) == self.world, f"{self}: ranks without a count"
        fits = all(size >= self.micros(rank) > 0 for rank, size in enumerate(sizes))
        assert fits, f"{self}: a micro-batch without samples"

    @property
    def world(self) -> int:
        return self.shares if isinstance(self.shares, int) else len(self.shares)

    def share(self, rank: int) -> int:
        """Return the number of samples of `rank`."""
        first, last = piece(self.samples, rank, self.shares)
        return last - first

    def micros(self, rank: int) -> int:
        """Return the number of micro-batches of `rank`."""
        return self.accumulate if isinstance(self.accumulate, int) else self.accumulate[rank]

    @property
    def micro(self) -> int:
        """The size of the largest micro-batch on any rank, in samples."""
        return max(-(-self.share(rank) // self.micros(rank)) for rank in range(self.world))


class Micro(NamedTuple):
    batch: Any
    weight: int  # number of items that the loss averages over
    refs: Sequence[Ref]  # the samples, in order; empty for an iterable of batches
    bad: list[Bad]  # those of `refs` that are not in the batch


class Step:
    """The micro-batches of one rank between two optimizer steps. Iterating yields (batch on the device, weight) once.

    A batch stays on the host until the previous one has been yielded, and yielded batches are not kept.

    Args:
        micros: Micro-batches, with an `Upload` for a batch that is not on the device yet.
        following: The next step's first micro-batch, whose upload begins with the last batch of this step.
    """

    reduces = True  # whether the last backward pass reduces the gradients over ranks
    _parts: Sequence[Sequence[Ref]] = ()  # `refs` by micro-batch; empty for a step that is derived from another

    def __init__(self, micros: Sequence[Micro], following: Sequence[Micro] = ()) -> None:
        self.weights: list[int] = []
        self.bad: list[Bad] = []
        self._batches: deque[Any] = deque()
        self._parts = parts = list[Sequence[Ref]]()
        for batch, weight, refs, bad in micros:
            self._batches.append(batch)
            parts.append(refs)
            self.weights.append(weight)
            self.bad += bad
        for micro in following:
            self._batches.append(micro.batch)
        self._all = len(self._batches)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        batches = self._batches
        for weight in self.weights:
            yield (self._uploaded() if isinstance(batches[0], Upload) else batches.popleft()), weight
        batches.clear()

    @property
    def refs(self) -> list[Ref]:
        """The samples, in order; empty for an iterable of batches."""
        return [ref for part in self._parts for ref in part]

    def peek(self) -> Any:
        """Return the first batch on the device, without removing it."""
        batch = self._batches[0]
        return batch.wait() if isinstance(batch, Upload) else batch

    def current(self) -> Sequence[Ref]:
        """Return the samples of the batch that was yielded last."""
        if not self._parts:
            return []
        yielded = min(self._all - len(self._batches), len(self._parts))
        return self._parts[yielded - 1] if yielded else []

    @during(Phase.UPLOAD)
    def _uploaded(self) -> Any:
        batch = self._batches.popleft()
        batch.wait()  # before the next upload begins, because this waits for all uploads that have begun
        if self._batches:
            self._batches[0].begin()
        return batch.take()


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in `batch`, or the number of packed sequences or of strings in a list.

    Samples may also be separate objects, such as images of several sizes: a list of them, or `tuple(zip(*samples))`.
    """
    whole = batch
    while not isinstance(batch, Tensor):
        if isinstance(batch, PackedSequence):
            return int(batch.batch_sizes[0])
        if isinstance(batch, (list, tuple)) and batch:  # `list | tuple` would build a union in each step
            first = batch[0]
            if isinstance(first, str) and all(isinstance(text, str) for text in batch):  # such as names of files
                return len(batch)
        elif isinstance(batch, Mapping) and batch:
            first = next(iter(batch.values()))
        else:
            raise DataError(
                f"a batch begins with a value of type {type(batch).__name__}, and has no tensor to count samples by; "
                "let transform() or collate() make tensors, or give the recipe a `weight`"
            )
        if batch is whole and not isinstance(first, Tensor) and (samples := count_objects(batch)) is not None:
            return samples
        batch = first
    try:
        return batch.shape[0]
    except IndexError:
        raise DataError(
            "a batch begins with a tensor of shape (), which has no samples to count; give the recipe a `weight`"
        ) from None


def count_objects(batch: Any) -> int | None:
    """Return the number of samples if each is a separate object, None if tensors have a row for each sample."""
    columns = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(columns, list | tuple) or not columns or not isinstance(columns[0], list | tuple | Mapping):
        return None
    if any(not isinstance(column, type(columns[0])) or len(column) != len(columns[0]) for column in columns):
        return None
    rows = [{tensor.shape[:1] for tensor in tensors_in(column)} for column in columns]
    collated = isinstance(batch, list) and not isinstance(columns[0], tuple)  # lists of rows, perhaps of two loaders
    if len(set().union(*rows)) < 2 or (collated and all(len(lengths) < 2 for lengths in rows)):
        return None  # each tensor has a row for each sample
    first = list(columns[0]) if isinstance(columns[0], list | tuple) else []
    kinds = {(type(item), item.dim() if isinstance(item, Tensor) else 0) for item in first}
    if len(kinds) == 1:  # all images, before all targets
        return len(first)
    return None if isinstance(batch, Mapping) else len(columns)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def steps_from(start: int, split_at: Callable[[int], Split]) -> Iterator[tuple[int, Split]]:
    """Yield the first position of each step and its split, endlessly."""
    while True:
        split = split_at(start)
        yield start, split
        start += split.samples
