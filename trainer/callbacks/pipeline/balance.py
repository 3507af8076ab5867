"""Cuts a sequence of blocks into stages so that the costliest stage costs as little as possible."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

TWICE = ("interleaved", "zero_bubble", "zbv")  # schedules with two stages on each rank
Fits = Callable[[int, int, int], bool]  # (stage, first block, stop) -> whether it fits


def best_cut(blocks: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...] | None:
    """Return the first block of each stage so that the costliest stage costs least; None if no cut is possible.

    `cost` maps a stage, its first block and the one after its last to a cost; inf if there can't be such a stage.
    """

    @cache
    def best(stages: int, blocks: int) -> tuple[float, tuple[int, ...]]:
        """Return the cost of the costliest stage, and the cut, if the first `blocks` blocks make so many stages."""
        if not stages:
            return (math.inf if blocks else 0.0), ()
        starts = range(stages - 1, blocks)
        costs = [(max(best(stages - 1, start)[0], cost(stages - 1, start, blocks)), start) for start in starts]
        worst, start = min(costs, default=(math.inf, 0))
        return worst, (*best(stages - 1, start)[1], start)

    worst, starts = best(stages, blocks)
    return starts if worst < math.inf else None


def balance(
    costs: Sequence[float], slow: Sequence[float], head: float, tail: float, fits: Fits
) -> tuple[int, ...] | None:
    """Return the first block of each stage so that the slowest stage is as fast as possible; None if no cut fits.

    `slow` is a factor on all costs of each stage. `head` and `tail` are added for the first and the last stage.
    """
    sums, last = [0.0, *accumulate(costs)], len(slow) - 1

    def cost(stage: int, start: int, stop: int) -> float:
        if not fits(stage, start, stop):
            return math.inf
        extra = (head if stage == 0 else 0.0) + (tail if stage == last else 0.0)
        return (sums[stop] - sums[start] + extra) * slow[stage]

    return best_cut(len(costs), len(slow), cost)
