"""Attributes of a recipe and its modules that passes change although they are no buffers, such as a hidden state."""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import printable
from trainer.log import log

SMALL = 1 << 16  # the largest tensor that is copied, and the longest list that is read; others may be data sets
PLAIN = (Tensor, tuple, list, dict, type(None))


def owners(recipe: Any, module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of the recipe and of the model's modules, by the owner's name."""
    found = {"recipe": vars(recipe)} if hasattr(recipe, "__dict__") else {}
    return found | {f"model.{name}".rstrip("."): vars(part) for name, part in module.named_modules()}


def plain(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in own.items() if not name.startswith("_") and isinstance(value, PLAIN))


@contextmanager
def tensors_kept(places: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Restore attributes that have tensors, such as a hidden state, after discarded passes. Counters are not restored.

    A tensor of more than `SMALL` values that is changed in place stays changed.
    """
    before = [(own, dict(own)) for own in places]
    inside = [t for own, values in before for _, value in plain(values) for t in tensors(value) if t.numel() <= SMALL]
    content = [(t, t._version, t.detach().clone()) for t in inside]
    try:
        yield
    finally:
        for own, values in before:
            for name in [name for name, value in plain(own) if other(value, values.get(name))]:
                if name in values:
                    own[name] = values[name]
                else:
                    del own[name]
        for tensor, version, value in content:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(value)


def other(after: Any, before: Any) -> bool:
    """Return whether an attribute has gained, lost or replaced a tensor."""
    return list(map(id, tensors(after))) != list(map(id, tensors(before)))


def copied(batch: Any) -> Any:
    """Return a shallow copy of a dict or list, so that members can be removed; tensors are not copied."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list | dict) and len(value) <= SMALL:
        return [inner for each in (value.values() if isinstance(value, dict) else value) for inner in tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def note_changes(steps: Iterator[Any], recipe: Any, module: nn.Module) -> Iterator[Any]:
    """Pass a resumed run's steps through; after the first, log which attributes with tensors it changed."""
    places, before = owners(recipe, module), dict[str, Any]()

    def note(step: Any) -> Any:
        before.update(state_of(places))
        return step

    def compare(step: Any) -> Any:
        warn_unsaved(before, state_of(places))
        before.clear()
        return step

    return itertools.chain(map(note, itertools.islice(steps, 1)), map(compare, itertools.islice(steps, 1)), steps)


def state_of(places: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[Tensor, int]]]:
    """Return the tensors of each attribute, each with its number of changes in place."""
    values = {f"{owner}.{name}": tensors(value) for owner, own in places.items() for name, value in plain(own)}
    return {name: [(each, each._version) for each in found] for name, found in values.items()}


def warn_unsaved(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> None:
    """Log the names of attributes whose tensors have changed, because checkpoints do not contain them."""
    ids = {name: [(id(each), version) for each, version in found] for name, found in before.items()}
    changed = [n for n, found in after.items() if found and [(id(each), v) for each, v in found] != ids.get(n)]
    if changed:
        log.warning(
            "resume: %s changes in a step, and checkpoints have parameters and buffers alone; keep it in a buffer, or "
            "the numbers are others than without the interruption",
            printable(", ".join(changed[:3])),
        )
