"""Orders the samples by a pure function of shard sizes and seed, so that one integer is the state of a run's data.

Each epoch permutes the shards, concatenates them, and cuts the result into lanes of equal length. Blocks inside a lane
are permuted, and rows across all lanes form the sequence. So a batch mixes `lanes` shards, while each lane is read
almost sequentially. The stream is the concatenation of epochs, so nothing is dropped, repeated or padded.

The numbers are frozen, because a change here would change the data of every resumed run.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.rng import BLOCK, SHARDS, mix_each


class Ref(NamedTuple):
    epoch: int
    shard: int
    offset: int  # in samples, within the shard


def permutation(size: int, *keys: int) -> list[int]:
    """Return a permutation of range(size): Fisher-Yates from the last position down, driven by `mix(*keys, place)`."""
    places = np.arange(1, size, dtype=np.uint64)
    partners = (mix_each(*keys, last=places) % (places + np.uint64(1))).tolist()
    items = list(range(size))
    for place in range(size - 1, 0, -1):
        partner = partners[place - 1]
        items[place], items[partner] = items[partner], items[place]
    return items


def near_equal(total: int, part: int, parts: int) -> tuple[int, int]:
    """Return the bounds of one of `parts` contiguous pieces. Lengths differ by at most one, and may be 0."""
    return part * total // parts, (part + 1) * total // parts


def piece(total: int, part: int, sizes: int | Sequence[int]) -> tuple[int, int]:
    """Return the bounds of one contiguous piece. `sizes` is the number of near-equal pieces, or their sizes."""
    if isinstance(sizes, int):
        return near_equal(total, part, sizes)
    first = sum(sizes[:part])
    return first, first + sizes[part]


class Order:
    """The endless training stream over shards of `counts` samples.

    Args:
        lanes: Number of lanes that are read in parallel; at most the number of samples.
        block: Consecutive samples of a lane that are shuffled among themselves.
    """

    def __init__(self, counts: Sequence[int], seed: int, lanes: int, block: int) -> None:
        self.samples = sum(counts)
        assert self.samples > 0 and lanes > 0 and block > 0
        self.counts, self.seed, self.block = counts, seed, block
        self.lanes = min(lanes, self.samples)
        self.bounds = [lane * self.samples // self.lanes for lane in range(self.lanes + 1)]
        self.rows = self.samples // self.lanes  # full ones; the lanes in `longer` have one sample more
        self.longer = np.flatnonzero(np.diff(self.bounds) > self.rows)
        self._epochs: dict[int, tuple[list[int], list[int]]] = {}
        self._blocks: dict[tuple[int, int, int], list[int]] = {}

    def local(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> list[Ref]:
        """Return the samples of `rank` at positions [start, stop) of the stream.

        Positions are sorted by lane before they are split, so that a rank keeps its lanes and shards for an epoch.

        Args:
            shares: The number of ranks, if they have even shares; or the samples of each rank.
        """
        return self.refs(self._local(start, stop, rank, shares))

    def shards(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> set[int]:
        """Return all shards of the blocks that `local` reads, at a much lower cost."""
        blocks = {(epoch, lane, row // self.block) for epoch, lane, row in self._local(start, stop, rank, shares)}
        return {shard for block in blocks for shard in self.shards_of(*block)}

    def _local(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> Iterator[tuple[int, int, int]]:
        epochs, lanes, rows = self.places(start, stop)
        first, last = piece(stop - start, rank, shares)
        mine = np.argsort(lanes, kind="stable")[first:last]
        return zip(epochs[mine].tolist(), lanes[mine].tolist(), rows[mine].tolist())

    def places(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch, lane and row of positions [start, stop)."""
        epochs, within = np.divmod(np.arange(start, stop), self.samples)
        rows, lanes = np.divmod(within, self.lanes)
        tail = rows == self.rows
        lanes[tail] = self.longer[lanes[tail]]
        return epochs, lanes, rows

    def refs(self, places: Iterable[tuple[int, int, int]]) -> list[Ref]:
        """Return the sample at each place: (epoch, lane, row)."""
        found: list[Ref] = []
        for epoch, lane, row in places:
            number, place = divmod(row, self.block)
            block = self._blocks.get((epoch, lane, number)) or self._block(epoch, lane, number)
            item = self.bounds[lane] + number * self.block + block[place]
            shards, starts = self._epochs.get(epoch) or self._epoch(epoch)
            index = bisect_right(starts, item) - 1
            found.append(Ref(epoch, shards[index], item - starts[index]))
        return found

    def shards_of(self, epoch: int, lane: int, number: int) -> list[int]:
        """Return the shards of a lane's block."""
        first = self.bounds[lane] + number * self.block
        last = min(first + self.block, self.bounds[lane + 1]) - 1
        shards, starts = self._epoch(epoch)
        return shards[bisect_right(starts, first) - 1 : bisect_right(starts, last)]

    def _epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the shards in this epoch's order, and the start of each in their concatenation."""
        if epoch not in self._epochs:
            shards = permutation(len(self.counts), self.seed, SHARDS, epoch)
            starts = list(accumulate((self.counts[shard] for shard in shards[:-1]), initial=0))
            remember(self._epochs, 2, epoch, (shards, starts))  # a batch may straddle two
        return self._epochs[epoch]

    def _block(self, epoch: int, lane: int, number: int) -> list[int]:
        """Compute the permutation of a block, and cache it for the samples that follow."""
        key = (epoch, lane, number)
        size = min(self.block, self.bounds[lane + 1] - self.bounds[lane] - number * self.block)
        remember(self._blocks, 4 * self.lanes, key, permutation(size, self.seed, BLOCK, *key))
        return self._blocks[key]


def remember(cache: dict[Any, Any], limit: int, key: Any, value: Any) -> None:
    """Add to `cache`, forgetting the oldest entry beyond `limit`."""
    if len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value


def walk(counts: Sequence[int], rank: int, world: int) -> Iterator[Ref]:
    """Yield a rank's contiguous piece of one epoch in the stored order, for validation."""
    first, last = near_equal(sum(counts), rank, world)
    for shard, count in enumerate(counts):
        yield from (Ref(0, shard, offset) for offset in range(max(0, first), min(count, last)))
        first, last = first - count, last - count
