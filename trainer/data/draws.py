"""Notices whether code draws from the global random generators, so that only samples that draw are seeded each."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.rng import seed_all

KEY = 0x5EED
NEXT = random.Random(KEY).getrandbits(64), np.random.RandomState(KEY).random_sample()
TORCH = torch.Generator().manual_seed(KEY).get_state().numpy().tobytes()


def watch() -> None:
    """Seed the generators, so that `untouched` can tell whether anything drew from them since."""
    seed_all(KEY)


def untouched() -> bool:
    """Return whether nothing was drawn, seeded or restored since `watch`. Call it once after each `watch`.

    The positions of the generators alone would miss code that draws exactly as many numbers as a state has.
    """
    following = random.getrandbits(64), np.random.random_sample()
    return following == NEXT and torch.default_generator.get_state().numpy().tobytes() == TORCH


def states() -> tuple[Any, ...]:
    """Return the states of the generators. This takes as long as reading some small samples."""
    kind, numbers, *rest = np.random.get_state()
    return (
        random.getstate(),
        kind,
        np.asarray(numbers).tobytes(),
        *rest,
        torch.default_generator.get_state().numpy().tobytes(),
    )


def same(one: Any, other: Any) -> bool:
    """Compare two nested samples bit by bit. Sparse tensors, and objects of an unknown class, count as different."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout == torch.strided
        return alike and torch.equal(bits(one), bits(other))
    if isinstance(one, np.ndarray | np.generic):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, str | bytes | int | float | complex | None) and one == other


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, so that NaN equals itself."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
