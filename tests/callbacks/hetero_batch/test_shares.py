"""Shares by speed: close to the best cut, found by trying all; and how soon they follow the ranks."""

import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from trainer.callbacks.hetero_batch.shares import cut_again, cut_shares, follow, keep, slowest, with_micros


def test_shares_are_the_parts_of_the_speeds():
    assert cut_shares(24, [1.0, 2.0, 5.0]) == [3, 6, 15]
    assert cut_shares(24, [1.0, 1.0, 10.0]) == [2, 2, 20]
    assert cut_shares(10, [1.0, 1.0, 1.0]) == [4, 3, 3]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_shares_are_faster(seed):
    rng = random.Random(seed)
    batch, least = rng.randint(6, 20), rng.randint(1, 2)
    speeds = [rng.uniform(0.1, 5.0) for _ in range(3)]
    shares = cut_shares(batch, speeds, least)
    assert sum(shares) == batch and min(shares) >= least
    others = (cut for cut in itertools.product(range(least, batch + 1), repeat=3) if sum(cut) == batch)
    assert slowest(shares, speeds) <= min(slowest(cut, speeds) for cut in others) * (1 + 1e-12)


PLACES = 3  # steps that are loaded ahead
EVERY = 10  # steps between two measurements
NOISE = 0.04  # of a step's time on each rank, of which the slowest counts


def simulate(speeds: Callable[[int], list[float]], steps: int, smoothing: float, batch: int = 384) -> list[float]:
    """The part of the sum of the ranks' speeds that each step has, on a clock of the test's own.

    As in the callback: the ranks measure over `EVERY` steps, each by its own clock, and new shares wait until no rank
    has loaded their step.
    """
    rng, world = random.Random(0), len(speeds(0))
    value: dict[str, Any] = with_micros([batch // world] * world, [8] * world)
    average: list[float] = []
    decided = [(0, value)]
    seconds, samples, parts = [0.0] * world, [0] * world, []
    for step in range(steps):
        shares = next(each["shares"] for first, each in reversed(decided) if first <= step)
        took = [share / speed * rng.uniform(1, 1 + NOISE) for share, speed in zip(shares, speeds(step), strict=True)]
        parts.append(batch / max(took) / sum(speeds(step)))
        seconds = [total + one for total, one in zip(seconds, took, strict=True)]
        samples = [total + one for total, one in zip(samples, shares, strict=True)]
        if (step + 1) % EVERY == 0:
            measured = [count / total for count, total in zip(samples, seconds, strict=True)]
            average = follow(average or measured, measured, smoothing)
            value = cut_again(value, batch, average, [8] * world, 1)
            decided.append((step + 1 + PLACES, value))
            seconds, samples = [0.0] * world, [0] * world
    return parts


def worst(parts: list[float]) -> float:
    """The least mean over `EVERY` steps."""
    return min(statistics.fmean(parts[i : i + EVERY]) for i in range(len(parts) - EVERY + 1))


SETTLED = EVERY + PLACES  # steps: one measurement, and the shares of the steps that are loaded


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9])
def test_unequal_ranks_reach_the_goal_after_one_measurement(smoothing):
    parts = simulate(lambda _: [1.0, 2.0, 5.0], 200, smoothing)
    assert max(parts[:SETTLED]) < 0.4 and worst(parts[SETTLED:]) >= 0.92


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("at", [100, 103, 109])
@pytest.mark.parametrize("later", [[1.0, 2.0, 2.0], [0.5, 2.0, 5.0], [1.0, 4.0, 5.0]])
def test_a_rank_that_changes_is_followed_after_two_measurements(smoothing, at, later):
    """The first one has steps from before the change. An average alone took 25 to 51 steps with a smoothing of 0.5."""
    parts = simulate(lambda step: [1.0, 2.0, 5.0] if step < at else later, 300, smoothing)
    assert worst(parts[at + SETTLED + EVERY :]) >= 0.92


def test_a_small_change_is_noise_that_the_average_hides():
    assert follow([1.0, 2.0, 4.0], [1.1, 2.0, 3.6], 0.5) == pytest.approx([1.05, 2.0, 3.8])
    assert follow([1.0, 2.0, 4.0], [1.2, 2.0, 3.0], 0.5) == pytest.approx([1.2, 2.0, 3.0])


def test_shares_stay_unless_others_save_enough():
    """By 2 %: 12 of 24 samples at speed 1 take as long as 11 take 9 % less."""
    before = {"shares": [12, 12], "micros": [3, 3]}
    assert cut_again(before, 24, [1.0, 1.01], [4, 4], 1) == before
    assert cut_again(before, 24, [1.0, 1.2], [4, 4], 1) == {"shares": [11, 13], "micros": [3, 4]}


def test_shares_that_stay_are_cut_into_what_the_ranks_hold():
    before = {"shares": [12, 12], "micros": [3, 3]}
    assert cut_again(before, 24, [1.0, 1.0], [4, 3], 1) == {"shares": [12, 12], "micros": [3, 4]}
    assert keep(before, [4, 2]) == {"shares": [12, 12], "micros": [3, 6]} and keep(before, [9, 9]) == before
