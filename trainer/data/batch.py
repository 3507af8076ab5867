"""What one rank trains on between two optimizer steps, and how much that weighs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from trainer.data.bad_samples import Bad
from trainer.data.sampling.order import Ref
from trainer.errors import DataError


class Step(NamedTuple):
    """One entry a micro-batch, on the device."""

    batches: list[Any]
    weights: list[int]  # items that each micro-batch's loss averages over
    refs: list[Ref]  # the samples, in order; empty for an iterable of batches
    bad: list[Bad]  # those of them that are not in the batches


class Micro(NamedTuple):
    batch: Any
    weight: int
    refs: list[Ref]
    bad: list[Bad]


def weight_of(recipe: Any) -> Callable[[Any], int]:
    return getattr(recipe, "weight", count_samples)


def count_samples(batch: Any) -> int:
    """Length of the first tensor in `batch`."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, (list, tuple)) and batch:  # a union would be made anew on every step
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            raise DataError(
                f"batch of type {type(batch).__name__} has no tensor to count samples by; give the recipe a `weight`"
            )
    return batch.shape[0]
