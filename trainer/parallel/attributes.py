"""Attributes of a recipe and of modules that passes change, such as a hidden state: they are no buffers."""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import printable
from trainer.log import log

SMALL = 1 << 16  # values of a tensor, or members of a list, that are copied: a recipe may hold a data set
PLAIN = (Tensor, int, float, str, tuple, list, set, dict, type(None))


def owners(recipe: Any, module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of the recipe and of the model's modules, by the owner's name."""
    found = {"recipe": vars(recipe)} if hasattr(recipe, "__dict__") else {}
    return found | {f"model.{name}".rstrip("."): vars(part) for name, part in module.named_modules()}


def plain(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in own.items() if not name.startswith("_") and isinstance(value, PLAIN))


@contextmanager
def attributes_kept(places: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Put back what discarded passes change: numbers, texts, tuples, and small tensors, lists, sets and dicts."""
    before = [(own, name, value, content(value)) for own in places for name, value in plain(own)]
    try:
        yield
    finally:
        for own, name, value, members in before:
            own[name] = value
            if isinstance(value, Tensor) and members is not None and value._version != members[0]:
                with torch.no_grad():
                    value.copy_(members[1])
            elif isinstance(value, list) and members is not None:
                value[:] = members
            elif isinstance(value, set | dict) and members is not None:
                value.clear()
                value.update(members)


def copied(batch: Any) -> Any:
    """Return a batch whose members can be taken out of it: a copy of a dict or a list, not of tensors."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def content(value: Any) -> Any:
    """Return a copy of what may change in place; None if nothing does, or it is large."""
    if isinstance(value, Tensor):
        return (value._version, value.detach().clone()) if value.numel() <= SMALL else None
    return value.copy() if isinstance(value, list | set | dict) and len(value) <= SMALL else None


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts."""
    if isinstance(value, tuple | list | dict) and len(value) <= SMALL:
        return [inner for each in (value.values() if isinstance(value, dict) else value) for inner in tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def note_changes(steps: Iterator[Any], recipe: Any, module: nn.Module) -> Iterator[Any]:
    """Yield the steps of a resumed run. Name the attributes with tensors that the first one changes."""
    places, before = owners(recipe, module), dict[str, Any]()
    for number, step in enumerate(steps):
        if number == 1:
            tell_unsaved(before, state_of(places))
        if number == 0:
            before = state_of(places)
        yield step


def state_of(places: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[Tensor, int]]]:
    """Return the tensors of each attribute, with the number of changes in place."""
    values = {f"{owner}.{name}": tensors(value) for owner, own in places.items() for name, value in plain(own)}
    return {name: [(each, each._version) for each in found] for name, found in values.items()}


def tell_unsaved(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> None:
    """Log the names of attributes whose tensors are others: no checkpoint has them."""
    ids = {name: [(id(each), version) for each, version in found] for name, found in before.items()}
    changed = [n for n, found in after.items() if found and [(id(each), v) for each, v in found] != ids.get(n)]
    if changed:
        log.warning(
            "resume: %s changes in a step, and checkpoints have parameters and buffers alone; keep it in a buffer, or "
            "the numbers are others than without the interruption",
            printable(", ".join(changed[:3])),
        )
