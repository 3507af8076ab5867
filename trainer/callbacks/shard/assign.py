"""Assigns parameters to ranks evenly by size."""

from collections.abc import Sequence


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank for each size: largest first, each to the rank with the least so far (Graham 1969)."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = min(range(ranks), key=loads.__getitem__)
        loads[found[i]] += sizes[i]
    return found
