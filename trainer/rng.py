"""Random numbers as pure functions of their purpose: one hash, and one generator a process that is set to a key."""

import random
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, Philox
from numpy.typing import NDArray

MASK = (1 << 64) - 1


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: multiples of it are far apart (Steele et al. 2014)


def mix(*keys: int) -> int:
    """A 64-bit hash of integers: a chain of splitmix64 (Steele et al. 2014), the same for ever.

    No order may depend on NumPy's generators (their streams may change between versions) or Python's hash (salted).
    """
    state = GOLDEN
    for key in keys:
        state = _scramble((state + (key & MASK) * 0xBF58476D1CE4E5B9) & MASK)
    return state


def mix_each(*keys: int, last: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix(*keys, x)` for every x in `last`."""
    return _scramble(np.uint64(mix(*keys)) + last * np.uint64(0xBF58476D1CE4E5B9))


def _scramble(state: Any) -> Any:
    """splitmix64's finalizer, for an int below 2**64 or an array of uint64, which wraps by itself."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


PHILOX = Philox(key=0)


FRESH: Any = PHILOX.state


GENERATOR = Generator(PHILOX)


def keyed(key: int) -> Generator:
    """As `Generator(Philox(key=key))`, in a tenth of the time: the one of this process, set back."""
    FRESH["state"]["key"][0] = key
    PHILOX.state = FRESH
    return GENERATOR


def seed_all(key: int) -> None:
    """For data to draw from. No model draws from it: the trainer seeds torch anew before each step."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
