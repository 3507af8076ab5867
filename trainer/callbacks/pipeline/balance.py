"""Cuts a sequence of blocks into stages so that the costliest stage costs as little as possible."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

TWICE = ("interleaved", "zero_bubble", "zbv")  # schedules with two stages on each rank
Fits = Callable[[int, int, int], bool]  # (stage, first block, stop) -> whether it fits


def best_cut(blocks: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...] | None:
    """Return the first block of each stage so that the costliest stage costs least; None if no cut is possible.

    `cost` maps a stage, its first block and the one after its last to a cost; inf if there can't be such a stage.
    """
    # best[s][i]: the cost of the costliest stage, minimised over the cuts of the first i blocks into s stages.
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
    """Return the first block of each stage so that the slowest stage is as fast as possible; None if no cut fits.

    Args:
        costs: Cost per block; there are at least as many blocks as stages.
        slow: Slowdown per stage: a factor on all of its costs.
        head, tail: Extra cost of the first stage, and of the last one.
    """
    sums, last = [0.0, *accumulate(costs)], len(slow) - 1

    def cost(stage: int, start: int, stop: int) -> float:
        if not fits(stage, start, stop):
            return math.inf
        extra = (head if stage == 0 else 0.0) + (tail if stage == last else 0.0)
        return (sums[stop] - sums[start] + extra) * slow[stage]

    return best_cut(len(costs), len(slow), cost)
