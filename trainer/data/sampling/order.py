"""Orders the samples by a pure function of shard sizes and seed, so that one integer is the state of a run's data.

Each epoch permutes the shards, concatenates them, and cuts the result into lanes of equal length. Blocks inside a lane
are permuted, and rows across all lanes form the sequence. So a batch mixes `lanes` shards, while each lane is read
almost sequentially. The stream is the concatenation of epochs, so nothing is dropped, repeated or padded.

The numbers are frozen, because a change here would change the data of every resumed run.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from trainer.rng import BLOCK, SHARDS, mix_each


class Ref(NamedTuple):
    epoch: int
    shard: int
    offset: int  # in samples, within the shard


class Refs(Sequence[Ref]):
    """Samples as an array of shape (samples, 3), whose columns are the fields of `Ref`."""

    __slots__ = ("rows",)

    def __init__(self, rows: NDArray[np.int64] | Sequence[Ref]) -> None:
        self.rows = np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Ref: ...
    @overload
    def __getitem__(self, at: slice) -> "Refs": ...
    def __getitem__(self, at: int | slice) -> "Ref | Refs":
        return Refs(self.rows[at]) if isinstance(at, slice) else Ref._make(self.rows[at].tolist())

    def __iter__(self) -> Iterator[Ref]:
        return map(Ref._make, self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Iterable) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType] like a list

    def __repr__(self) -> str:
        return repr(list(self))


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


Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # epoch, lane and row of each sample


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
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._tables: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}

    def local(self, start: int, stop: int, rank: int, shares: int | Sequence[int], steps: int = 1) -> Refs:
        """Return the samples of `rank` in the equal `steps` of positions [start, stop) of the stream.

        A step's positions are sorted by lane before they are split, so that a rank keeps its lanes and shards for an
        epoch.

        Args:
            shares: The number of ranks, if they have even shares; or the samples of each rank in a step.
        """
        return self.refs(*self._local(start, stop, rank, shares, steps))

    def shards(self, start: int, stop: int, rank: int, shares: int | Sequence[int]) -> set[int]:
        """Return all shards of the blocks that `local` reads, at a much lower cost."""
        epochs, lanes, rows = self._local(start, stop, rank, shares)
        blocks = set(zip(epochs.tolist(), lanes.tolist(), (rows // self.block).tolist()))
        return {shard for block in blocks for shard in self.shards_of(*block)}

    def _local(self, start: int, stop: int, rank: int, shares: int | Sequence[int], steps: int = 1) -> Places:
        epochs, lanes, rows = self.places(start, stop)
        size = (stop - start) // steps
        mine = lanes.reshape(steps, size).argsort(axis=1, kind="stable")[:, slice(*piece(size, rank, shares))]
        mine = (mine + np.arange(0, stop - start, size)[:, None]).ravel()
        return epochs[mine], lanes[mine], rows[mine]

    def places(self, start: int, stop: int) -> Places:
        """Return the epoch, lane and row of positions [start, stop)."""
        epochs, within = np.divmod(np.arange(start, stop), self.samples)
        rows, lanes = np.divmod(within, self.lanes)
        tail = rows == self.rows
        lanes[tail] = self.longer[lanes[tail]]
        return epochs, lanes, rows

    def refs(self, epochs: NDArray[np.int64], lanes: NDArray[np.int64], rows: NDArray[np.int64]) -> Refs:
        """Return the sample at each place."""
        found = np.empty((len(epochs), 3), np.int64)
        found[:, 0] = epochs
        numbers, places = np.divmod(rows, self.block)
        for epoch, here in groups(epochs):
            items = np.empty(len(epochs[here]), np.int64)
            for number, mine in groups(numbers[here]):
                items[mine] = self._items(epoch, number, lanes[here][mine], places[here][mine])
            shards, starts = self._epoch(epoch)
            index = starts.searchsorted(items, "right") - 1
            found[here, 1], found[here, 2] = shards[index], items - starts[index]
        return Refs(found)

    def shards_of(self, epoch: int, lane: int, number: int) -> list[int]:
        """Return the shards of a lane's block."""
        first = self.bounds[lane] + number * self.block
        last = min(first + self.block, self.bounds[lane + 1]) - 1
        shards, starts = self._epoch(epoch)
        return shards[starts.searchsorted(first, "right") - 1 : starts.searchsorted(last, "right")].tolist()

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards in this epoch's order, and the start of each in their concatenation."""
        if epoch not in self._epochs:
            shards = np.array(permutation(len(self.counts), self.seed, SHARDS, epoch))
            ends = np.cumsum(np.asarray(self.counts, np.int64)[shards])
            remember(self._epochs, 2, epoch, (shards, np.concatenate([[0], ends[:-1]])))  # a batch may straddle two
        return self._epochs[epoch]

    def _items(self, epoch: int, number: int, lanes: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at `places` of the lanes' blocks, counted along the epoch. Permutations are kept."""
        if (epoch, number) not in self._tables:
            width = min(self.block, self.rows + 1)  # a window may be longer than a lane
            tables = np.zeros((self.lanes, width), np.int64), np.zeros(self.lanes, np.bool_)
            remember(self._tables, 4, (epoch, number), tables)
        table, known = self._tables[epoch, number]
        for lane in dict.fromkeys(lanes[~known[lanes]].tolist()):
            first = self.bounds[lane] + number * self.block
            size = min(self.block, self.bounds[lane + 1] - first)
            table[lane, :size] = permutation(size, self.seed, BLOCK, epoch, lane, number)
            table[lane, :size] += first
            known[lane] = True
        return table[lanes, places]


def groups(values: NDArray[np.int64]) -> Iterator[tuple[int, Any]]:
    """Yield each distinct value, with an index of its places."""
    if not len(values):
        return
    low, high = int(values.min()), int(values.max())
    if low == high:
        yield low, slice(None)
        return
    by_value = values.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(values[by_value])) + 1
    for places in np.split(by_value, starts):
        yield int(values[places[0]]), places


def remember(cache: dict[Any, Any], limit: int, key: Any, value: Any) -> None:
    """Add to `cache`, forgetting the oldest entry beyond `limit`."""
    if len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value


def walk(counts: Sequence[int], rank: int, world: int, size: int) -> Iterator[Refs]:
    """Yield a rank's contiguous piece of one epoch in the stored order, `size` samples at a time, for validation."""
    ends = np.cumsum(np.asarray(counts, np.int64))
    first, last = near_equal(sum(counts), rank, world)
    for start in range(first, last, size):
        numbers = np.arange(start, min(start + size, last))
        shards = ends.searchsorted(numbers, "right")
        offsets = numbers - (ends[shards] - np.asarray(counts, np.int64)[shards])
        yield Refs(np.stack([np.zeros_like(numbers), shards, offsets], axis=1))
