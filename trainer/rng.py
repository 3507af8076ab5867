"""Derives random numbers from keys: one hash, and one generator per process that is reset to a key before each use."""

import random
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, Philox
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: multiples of it are far apart (Steele et al. 2014)


# Purposes: each is a key of `mix`, between the seed and the keys in parentheses. The numbers are frozen because another
# number would change the bits of runs, so a new purpose needs a new number. Three numbers have two purposes each:
# 4 and 6 with different numbers of keys, and 7 once to seed a generator and once to draw a place.
SHARDS = 1  # (epoch, place): order of an epoch's shards
BLOCK = 2  # (epoch, lane, block, place): order of the samples in a block
SAMPLE = 3  # (epoch, sample): reading and transforming a sample
RECIPE_DATA = 4  # (): the recipe's `data`
ITERABLE = 4  # (rank): an iterable of batches
STEP = 5  # (rank): a step, such as its dropout
MIXTURE_ORDER = 6  # (data set): seed of a data set's order in a mixture
CODEC_NOISE = 6  # (step, rank, *shape, start, stop): rounding of gradients
MIXTURE_PLACES = 7  # (block, place): order of the data sets in a block of a mixture
POWERSGD_START = 7  # (rows, columns): first factor of a matrix
PIPELINE = 8  # (rank, step, micro-batch, part): a pipeline's forward pass: before the blocks, each block, after them
ROUNDING = 9  # (step, parameter): stochastic rounding of weights that are stored in bf16
UPDATE_BN = 10  # (rank): the passes that compute running statistics of averaged weights
STREAM = 11  # (epoch, rank, draw): draws from the shuffle buffer of a stream


def mix(*keys: int) -> int:
    """Return a 64-bit hash of integers: a chain of splitmix64 (Steele et al. 2014). It never changes.

    An order must not depend on NumPy's generators, whose streams may change between versions, or on Python's salted
    hash.
    """
    state = GOLDEN
    for key in keys:
        state = _scramble((state + (key & MASK) * 0xBF58476D1CE4E5B9) & MASK)
    return state


def mix_each(*keys: int, last: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix(*keys, x)` for every x in `last`."""
    return _scramble(np.uint64(mix(*keys)) + last * np.uint64(0xBF58476D1CE4E5B9))


def _scramble(state: Any) -> Any:
    """Apply splitmix64's finalizer to an int below 2**64, or to an array of uint64, which wraps around by itself."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


PHILOX = Philox(key=0)
FRESH: Any = PHILOX.state
GENERATOR = Generator(PHILOX)


def keyed(key: int) -> Generator:
    """Return this process's generator, reset to `Generator(Philox(key=key))`: ten times faster than making one."""
    FRESH["state"]["key"][0] = key
    PHILOX.state = FRESH
    return GENERATOR


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return torch's own generators that a model on the device draws from.

    Unlike these, `torch.manual_seed` records a stack trace in every call for each device that was never initialised.
    """
    cuda = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [torch.default_generator, *cuda]


def seed_all(key: int) -> None:
    """Seed the generators that data loading uses. The trainer reseeds torch before each step, for the model."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
