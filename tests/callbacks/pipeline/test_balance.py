"""The cheapest cut against all that there are."""

import math
from itertools import combinations

import pytest

from trainer.callbacks.pipeline.balance import balance, best_cut


def anything(stage: int, start: int, stop: int) -> bool:
    return True


@pytest.mark.parametrize("costs", [[1.0] * 7, [5.0, 1, 1, 1, 1, 9, 2], [1.0, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("ends", [(0.0, 0.0), (4.0, 2.5)])
@pytest.mark.parametrize("slow", [[1.0, 1.0], [1.0, 3.0, 1.0], [1.0] * 7])
def test_no_other_cut_has_a_cheaper_costliest_stage(costs: list[float], ends: tuple[float, float], slow: list[float]):
    def worst(starts: tuple[int, ...]) -> float:
        sums = [sum(costs[a:b]) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True)]
        sums[0], sums[-1] = sums[0] + ends[0], sums[-1] + ends[1]
        return max(cost * factor for cost, factor in zip(sums, slow, strict=True))

    every = [(0, *cut) for cut in combinations(range(1, len(costs)), len(slow) - 1)]
    assert worst(balance(costs, slow, *ends, fits=anything)) == min(map(worst, every))


def test_no_cut_is_none():
    def cost(stage: int, start: int, stop: int) -> float:
        return math.inf if stop - start > 1 else 1.0

    assert best_cut(3, 3, cost) == (0, 1, 2) and best_cut(4, 3, cost) is None
