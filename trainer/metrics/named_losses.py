"""Measures the additional losses of a recipe whose `loss` returns several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor

from trainer.checks.recipe import is_one_number, refusal

EXPECTED = "the tensor 'loss', and for each other name a tensor of one number, or a number"


@dataclass(eq=False)
class NamedLosses:
    """`recipe.loss`, which may return a dict: `loss` is trained, the other entries are logged."""

    recipe: Any  # user code may replace its `loss` during the run
    step: Callable[[], int | None]  # returns the current step; None outside of steps, whose losses are not measured
    noted: int | None = None  # the step of `parts`
    parts: list[dict[str, Any]] = field(default_factory=list)  # of each micro-batch

    def __call__(self, model: Any, batch: Any) -> Any:
        found = self.recipe.loss(model, batch)
        if not isinstance(found, Mapping):
            return found
        others = further(found)
        if (step := self.step()) is not None:
            self.parts = self.parts if step == self.noted else []
            self.noted = step
            self.parts.append({k: v.detach() if isinstance(v, Tensor) else v for k, v in others.items()})
        return found["loss"]

    def sums(self, weights: Sequence[int]) -> dict[str, tuple[float, int]]:
        """Return name -> (sum, count) over the items of this rank's micro-batches. Waits for the device.

        `weights` are the items of each micro-batch. Losses of repeated passes come first, and are ignored.
        """
        found: dict[str, tuple[float, int]] = {}
        for part, weight in zip(self.parts[-len(weights) :], weights, strict=False):
            for name, value in part.items() if weight else ():
                total, count = found.get(name, (0.0, 0))
                found[name] = total + float(value) * weight, count + weight
        return found


def further(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the additional losses of a dict that `recipe.loss` returned."""
    if "loss" not in found:
        raise refusal("loss", found, EXPECTED)
    others = {name: value for name, value in found.items() if name != "loss"}
    for name, value in others.items():
        if not is_one_number(value) and not isinstance(value, Real):
            raise refusal("loss", value, EXPECTED, f" for {name!r}")
    return others


def combined(ranks: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Return the mean of each additional loss over the items of all ranks, as `train/NAME`."""
    return {f"train/{name}": value for name, value in mean_of(ranks).items()}


def mean_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of each name's (sum, count) over all ranks. A count of 0 leaves the name out."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    both = {name: [sum(rank[name][i] for rank in ranks if name in rank) for i in (0, 1)] for name in names}
    return {name: total / count for name, (total, count) in both.items() if count}
