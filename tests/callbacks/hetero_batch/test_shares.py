"""Shares by speed: close to the best cut, found by trying all."""

import itertools
import random

import pytest

from trainer.callbacks.hetero_batch.shares import cut_shares, slowest


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
