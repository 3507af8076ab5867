"""Mixes several data sets into one stream by weight: each position of the stream maps to a position in one data set.

The numbers are frozen, like those of `trainer.data.sampling.order`. The mixture's state is the same one integer.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from trainer.data.sampling.order import Order, Refs, groups, permutation, piece, remember
from trainer.errors import DataError
from trainer.rng import MIXTURE_ORDER, MIXTURE_PLACES, mix

DRAWS = 4096  # positions in a block; each data set has its share of a block, to one sample
LEAST = 1e-3  # smallest share of a data set; a smaller one would have no sample in some blocks


class Mixture:
    """The endless training stream over several data sets, each with its own order and epochs.

    Args:
        counts: For each data set, the samples in its shards.
        weights: For each data set, its share of the stream, relative to the others.
        lanes: As for `Order`; each data set gets its share of them.

    Raises:
        DataError: A weight is too small, or not a number.
    """

    def __init__(
        self, counts: Sequence[Sequence[int]], weights: Sequence[float], seed: int, lanes: int, block: int
    ) -> None:
        total = sum(weights)
        if not all(weight >= LEAST * total > 0 for weight in weights):
            reason = f"each must be at least {LEAST:g} of their sum"
            raise DataError(
                f"recipe.data('train'): weights {list(weights)}: {reason}; leave that data out, or raise its weight"
            )
        shares = [weight / total for weight in weights]
        self.ends = list(accumulate(shares))  # the last is 1, to rounding
        self.orders = [
            Order(sizes, mix(seed, MIXTURE_ORDER, i), max(1, round(lanes * share)), block)
            for i, (sizes, share) in enumerate(zip(counts, shares, strict=True))
        ]
        self.first_shards = list(accumulate(map(len, counts), initial=0))
        self.samples, self.seed = sum(map(sum, counts)), seed  # samples of an epoch of the run: those of all data sets
        self._drawn: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def local(self, start: int, stop: int, rank: int, shares: int | Sequence[int], steps: int = 1) -> Refs:
        """Return the samples, like `Order.local`; a step has a similar share of each data set's lanes."""
        size = (stop - start) // steps
        return Refs(np.concatenate([self._step(at, at + size, rank, shares) for at in range(start, stop, size)]))

    def _step(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> NDArray[np.int64]:
        sources, *places = self._local(start, stop, rank, shares)
        found = np.empty((len(sources), 3), np.int64)
        for source, here in groups(sources):
            epochs, lanes, rows = (each[here] for each in places)
            found[here] = self.orders[source].refs(epochs, lanes, rows).rows
            found[here, 1] += self.first_shards[source]
        return found

    def shards(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> set[int]:
        """Return the shards, like `Order.shards`."""
        places = zip(*self._local(start, stop, rank, shares).tolist(), strict=True)
        blocks = {(source, epoch, lane, row // self.orders[source].block) for source, epoch, lane, row in places}
        return {self.first_shards[i] + shard for i, *block in blocks for shard in self.orders[i].shards_of(*block)}

    def _local(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> NDArray[np.int64]:
        """Return the data set of each position, and its epoch, lane and row there, as rows of an array."""
        sources, positions = self._draw(start, stop)
        depths: list[NDArray[np.float64]] = []  # relative place in the data set's lanes, by which data sets are merged
        places: list[NDArray[np.int64]] = []
        for source, order in enumerate(self.orders):
            mine = positions[sources == source]
            if len(mine):
                epochs, lanes, rows = order.places(int(mine[0]), int(mine[-1]) + 1)
                by_lane = np.argsort(lanes, kind="stable")
                depths.append((np.arange(len(mine)) + 0.5) / len(mine))
                places.append(np.stack([np.full(len(mine), source), epochs, lanes, rows])[:, by_lane])
        first, last = piece(stop - start, rank, shares)
        own = np.argsort(np.concatenate(depths), kind="stable")[first:last]
        return np.concatenate(places, axis=1)[:, own]

    def _draw(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the data set of each position, and the position in its stream; consecutive within a data set."""
        numbers = range(start // DRAWS, -(-stop // DRAWS))
        sources, positions = (np.concatenate(parts) for parts in zip(*map(self._block, numbers), strict=True))
        here = slice(start - numbers[0] * DRAWS, stop - numbers[0] * DRAWS)
        return sources[here], positions[here]

    def _block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if number not in self._drawn:
            before, after = self._before(number * DRAWS), self._before((number + 1) * DRAWS)
            drawn = np.repeat(np.arange(len(self.orders)), after - before)
            sources = drawn[permutation(DRAWS, self.seed, MIXTURE_PLACES, number)]
            positions = np.empty(DRAWS, np.int64)
            for source, first in enumerate(before.tolist()):
                mine = sources == source
                positions[mine] = first + np.arange(mine.sum())
            remember(self._drawn, 2, number, (sources, positions))
        return self._drawn[number]

    def _before(self, position: int) -> NDArray[np.int64]:
        """Count the samples of each data set before `position`, a multiple of `DRAWS`."""
        ends = [int(end * position) for end in self.ends[:-1]]
        return np.diff(np.array([0, *ends, position]))
