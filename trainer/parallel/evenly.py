"""Divides a sequence of parameters into even parts."""

from collections.abc import Sequence


def evenly(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide parameters of these sizes into at most `count` consecutive parts of similar size, as lists of indices."""
    parts: list[list[int]] = [[] for _ in range(count)]
    total, before = sum(sizes), 0
    for index, size in enumerate(sizes):
        parts[min(before * count // total, count - 1)].append(index)  # a parameter without elements may be last
        before += size
    return [part for part in parts if part]
