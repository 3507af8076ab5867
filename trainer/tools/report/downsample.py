"""Reduces a series of any length, in one pass and bounded memory, to what a screen can show.

Steps are cut into equal ranges. A range keeps the mean, the smallest and the largest of its values, so a line with a
band hides no spike.

Jugel et al. 2014 (M4, doi:10.14778/2732951.2732953) show which values draw the pixels of all: first, last, smallest
and largest of each column. The mean replaces first and last, since a reader wants the trend.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
INDEX, COUNT, STEPS, FINITE, SUM, LOW, HIGH = range(7)  # columns of the table


class Ranges:
    """A series that grows, exact while it has few values.

    Args:
        most: Ranges to keep at the end. Until then up to twice as many are kept before neighbours are merged.
    """

    def __init__(self, most: int) -> None:
        self.most, self.width = most, 1.0
        self.table: Array = np.empty((0, 7))

    def add(self, steps: Array, values: Array) -> None:
        """Add values (n) of `steps` (n), in any order. Values that are not finite are counted."""
        finite = np.isfinite(values)
        rows = np.empty((len(steps), 7))
        rows[:, INDEX], rows[:, COUNT], rows[:, STEPS] = steps // self.width, 1, steps
        rows[:, FINITE], rows[:, SUM] = finite, np.where(finite, values, 0.0)
        rows[:, LOW], rows[:, HIGH] = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        self.table = merge(np.concatenate([self.table, merge(rows)]))
        self._shrink(2 * self.most)

    def close(self) -> None:
        self._shrink(self.most)

    def _shrink(self, most: int) -> None:
        while len(self.table) > most:
            self.width *= 2
            self.table[:, INDEX] //= 2
            self.table = merge(self.table)

    @property
    def steps(self) -> Array:
        return self.table[:, STEPS] / self.table[:, COUNT]

    @property
    def mean(self) -> Array:
        """The mean of the finite values of each range; NaN without any."""
        finite = self.table[:, FINITE]
        return np.where(finite > 0, self.table[:, SUM] / np.maximum(finite, 1), np.nan)

    @property
    def exact(self) -> bool:
        return bool((self.table[:, COUNT] == 1).all())

    @property
    def bounds(self) -> tuple[Array, Array]:
        """The smallest and the largest finite value of each range; NaN without any."""
        empty = self.table[:, FINITE] == 0
        return tuple(np.where(empty, np.nan, self.table[:, column]) for column in (LOW, HIGH))  # pyright: ignore

    @property
    def bad(self) -> Array:
        return self.table[:, COUNT] - self.table[:, FINITE]


def merge(rows: Array) -> Array:
    """Merge the rows of each index into one, and sort by index."""
    index = rows[:, INDEX]
    if len(rows) < 2:
        return rows
    if (index[1:] < index[:-1]).any():
        rows = rows[np.argsort(index, kind="stable")]
        index = rows[:, INDEX]
    starts = np.flatnonzero(np.concatenate([[True], index[1:] != index[:-1]]))
    if len(starts) == len(rows):
        return rows
    with np.errstate(over="ignore"):  # a sum that is not finite gives a gap
        merged = np.add.reduceat(rows, starts)
    merged[:, INDEX] = index[starts]
    merged[:, LOW] = np.minimum.reduceat(rows[:, LOW], starts)
    merged[:, HIGH] = np.maximum.reduceat(rows[:, HIGH], starts)
    return merged
