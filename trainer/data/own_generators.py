"""Finds and seeds random generators that a data set or its transforms keep as attributes."""

import random
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.rng import GOLDEN, MASK

KINDS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)
LEAVES = (str, bytes, int, float, Tensor, np.ndarray, nn.Module, type, FunctionType, ModuleType, type(None))
MAX_OBJECTS = 10_000  # objects that a search visits
MAX_MEMBERS = 100  # longest list or dict that is searched; longer ones contain samples


def generators_in(root: Any) -> list[Any]:
    """Return each generator in the attributes of an object and its class, recursively."""
    queue, seen, found = deque([root]), {id(root)}, list[Any]()
    while queue and len(seen) < MAX_OBJECTS:
        value = queue.popleft()
        if isinstance(value, KINDS):
            found.append(value)
            continue
        for part in parts_of(value):
            if id(part) not in seen and not isinstance(part, LEAVES):
                seen.add(id(part))
                queue.append(part)
    return found


def parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | dict):
        if len(value) <= MAX_MEMBERS:
            yield from value.values() if isinstance(value, dict) else value
        return
    attributes = getattr(value, "__dict__", None)
    yield from attributes.values() if isinstance(attributes, dict) else ()
    class_attributes = (part for kind in type(value).__mro__ for part in vars(kind).values())
    yield from (part for part in class_attributes if isinstance(part, KINDS))


def seed_each(generators: list[Any], key: int) -> None:
    """Seed each generator with a different number derived from `key`."""
    for generator in generators:
        key = key + GOLDEN & MASK
        if isinstance(generator, np.random.RandomState):
            generator.seed(key & 0xFFFFFFFF)
        elif isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(key).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(key & (MASK >> 1))
        else:
            generator.seed(key)
