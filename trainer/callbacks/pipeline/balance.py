"""Cuts a row of blocks into stages, so that the costliest costs least."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

TWICE = ("interleaved", "zero_bubble", "zbv")  # schedules with two stages on each rank
Fits = Callable[[int, int, int], bool]  # (stage, its first block, the one after its last) -> whether it has room


def best_cut(blocks: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...] | None:
    """Cut a row of blocks so that the costliest stage costs least; return the first block of each, None if none can.

    Args:
        cost: (stage, its first block, the one after its last) -> its cost; inf if there can't be such a stage.
    """
    # best[s][i]: the least cost of the costliest of s stages that run the first i blocks.
    best = [[math.inf] * (blocks + 1) for _ in range(stages + 1)]
    cut = [[0] * (blocks + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for s in range(1, stages + 1):
        for i in range(s, blocks + 1):
            for j in range(s - 1, i):
                if best[s - 1][j] < best[s][i] and (worst := max(best[s - 1][j], cost(s - 1, j, i))) < best[s][i]:
                    best[s][i], cut[s][i] = worst, j
    if best[stages][blocks] == math.inf:
        return None
    starts, end = [], blocks
    for s in range(stages, 0, -1):
        end = cut[s][end]
        starts.append(end)
    return tuple(reversed(starts))


def balance(
    costs: Sequence[float], slow: Sequence[float], head: float, tail: float, fits: Fits
) -> tuple[int, ...] | None:
    """Return the first block of each stage, so that the slowest takes least, of those that fit; None if none does.

    Args:
        costs: Of each block; at least as many as stages.
        slow: Of each stage: a factor on all of its costs.
        head, tail: The first stage costs as much more, and the last one.
    """
    sums, last = [0.0, *accumulate(costs)], len(slow) - 1

    def cost(stage: int, start: int, stop: int) -> float:
        if not fits(stage, start, stop):
            return math.inf
        extra = (head if stage == 0 else 0.0) + (tail if stage == last else 0.0)
        return (sums[stop] - sums[start] + extra) * slow[stage]

    return best_cut(len(costs), len(slow), cost)
