"""Splits a step's batches into smaller parts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.data.batch import Step
from trainer.data.resize import cut_batch


class Parts(Step):
    """A step whose batches are split into parts of at most `most` samples. No backward pass reduces gradients.

    `weigh` counts the items of a part. `key` is the calling callback's key, for errors.
    """

    reduces = False

    def __init__(self, step: Step, most: int, weigh: Callable[[Any], int], key: str) -> None:
        self.step, self.most, self.weigh, self.key, self.weights = step, most, weigh, key, step.weights
        self.parts: list[list[int]] = []  # the weights of each batch's parts

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for batch, weight in self.step:
            cut = cut_batch(batch, self.most, self.key) if weight else [batch]
            self.parts.append([weight] if len(cut) == 1 else [self.weigh(part) for part in cut])
            yield from zip(cut, self.parts[-1], strict=True)

    def merge(self, losses: list[Tensor]) -> list[Tensor]:
        """Return each batch's loss, the mean of its parts' losses weighted by their items."""
        rest = iter(losses)
        return [weighted_mean([(next(rest), weight) for weight in weights]) for weights in self.parts]


def weighted_mean(losses: list[tuple[Tensor, int]]) -> Tensor:
    total = sum(weight for _, weight in losses)
    if len(losses) == 1 or not total:
        return losses[0][0]
    return torch.stack([loss.detach() * (weight / total) for loss, weight in losses if weight]).sum()
