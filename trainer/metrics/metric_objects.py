"""Supports torchmetrics objects in a recipe: it updates them, and they are computed at the end of a validation."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from trainer.checks.recipe import describe, is_one_number
from trainer.errors import ConfigError

METHODS = ("update", "compute", "reset")  # of `torchmetrics.Metric`, which is not imported


class MetricObjects:
    """A validation set's metric objects by name. Their `compute` sums states over ranks, as torchmetrics does.

    `new_group` creates a process group of the given ranks; a collective over all ranks.
    """

    def __init__(self, rank: int, world: int, new_group: Callable[[list[int]], dist.ProcessGroup]) -> None:
        self.rank, self.new_group = rank, new_group
        self.groups: dict[tuple[int, ...], Any] = {tuple(range(world)): None}  # None: torch's group of all ranks
        self.prefix = ""
        self.objects: dict[str, Any] = {}

    def begin(self, prefix: str) -> None:
        """Start a data set, whose metrics get this prefix. Objects of an interrupted validation are reset."""
        for metric in self.objects.values():
            metric.reset()
        self.prefix, self.objects = prefix, {}

    def take(self, found: Any) -> Any:
        """Remove the objects from the recipe's result, and return the rest."""
        own = {name: value for name, value in found.items() if is_object(value)} if isinstance(found, Mapping) else {}
        self.objects |= {f"{self.prefix}/{name}": value for name, value in own.items()}
        return {name: value for name, value in found.items() if name not in own} if own else found

    def updated(self) -> dict[str, bool]:
        """Return for each object whether this rank has updated it."""
        called = {
            name: [part.update_called for part in parts_of(value) if hasattr(part, "update_called")]
            for name, value in self.objects.items()
        }
        return {name: any(parts) or not parts for name, parts in called.items()}

    def compute(self, updated: Sequence[Mapping[str, bool]]) -> dict[str, float]:
        """Compute each of this rank's objects over the batches of all ranks. A collective.

        Ranks that have not updated an object do not take part, unless no rank has. An object that fails does not keep
        this rank from the collectives of the next one.

        Args:
            updated: The result of `updated` on each rank.
        """
        values: dict[str, float] = {}
        failure = None
        for name in sorted(set(chain(*updated))):
            have = [rank for rank, own in enumerate(updated) if name in own]
            group = self._group([rank for rank in have if updated[rank][name]] or have)
            if group is not NOT_HERE:
                try:
                    with synced_over(self.objects[name], group):
                        values |= numbers(name, self.objects[name].compute())
                except Exception as error:
                    failure = failure or error
        for metric in self.objects.values():  # a further validation may have objects of the same recipe
            metric.reset()
        if failure:
            raise failure
        return values

    def _group(self, ranks: list[int]) -> Any:
        """Return the ranks' process group, or `NOT_HERE` if this rank is not in it."""
        key = tuple(ranks)
        if key not in self.groups:
            self.groups[key] = self.new_group(ranks)
        return self.groups[key] if self.rank in ranks else NOT_HERE


NOT_HERE = object()


def is_object(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in METHODS)


def parts_of(value: Any) -> list[Any]:
    """Return the modules in an object: a collection has several metrics, and a wrapper contains another one."""
    return modules_in(value) or [value]


def modules_in(value: Any) -> list[nn.Module]:
    if isinstance(value, dict):
        return [module for each in value.values() for module in modules_in(each)]
    return list(value.modules()) if isinstance(value, nn.Module) else []


def numbers(name: str, value: Any) -> dict[str, float]:
    """Return an object's computed value by name; a collection has several."""
    named = {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    for key, one in named.items():
        if not is_one_number(one):
            fix = "give an object that computes one number"
            raise ConfigError(f"recipe.metrics(): {key} computes {describe(one)}; {fix}")
    return {key: float(one) for key, one in named.items()}


@contextmanager
def synced_over(metric: Any, group: Any) -> Iterator[None]:
    """Make torchmetrics sum states over the ranks in `group`; None: over its default ranks."""
    parts = [part for part in parts_of(metric) if group is not None and hasattr(part, "process_group")]
    before = [part.process_group for part in parts]
    for part in parts:
        part.process_group = group
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part.process_group = own


@contextmanager
def kept(parts: Iterable[Any]) -> Iterator[None]:
    """Restore the objects' attributes on exit: numbers, tensors, and the members of lists, sets and dicts."""
    attributes = [vars(part) for part in parts if hasattr(part, "__dict__")]
    before = [
        {name: copied(each) for name, each in own.items() if not (name.startswith("_") and isinstance(each, dict))}
        for own in attributes
    ]
    try:
        yield
    finally:
        for own, values in zip(attributes, before, strict=True):
            own.update(values)


def copied(value: Any) -> Any:
    """Copy what changes in place: a tensor; a list or set without its members; a dict with its values."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        own = copy.copy(value)
        own.update({key: copied(each) for key, each in value.items()})
        return own
    return copy.copy(value) if isinstance(value, list | set) else value
