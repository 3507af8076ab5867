"""Parameters over ranks: each has an owner, and no rank has far more than the others."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trainer.callbacks.shard.owners import assign


def test_the_largest_comes_first_and_goes_to_the_least_loaded():
    assert assign([1, 5, 2, 4, 3], 2) == [0, 0, 0, 1, 1]  # 5 + 2 + 1 and 4 + 3
    assert assign([4, 4, 4], 3) == [0, 1, 2]
    assert assign([7], 3) == [0]


@given(st.lists(st.integers(1, 99), min_size=1, max_size=9), st.integers(1, 4))
def test_no_rank_has_more_than_the_bound_of_this_rule(sizes, ranks):
    """Graham 1969: at most 4/3 - 1/(3 m) of the best there is; here the best is found by trying all."""
    loads = [0] * ranks
    for size, rank in zip(sizes, assign(sizes, ranks), strict=True):
        loads[rank] += size
    assert sum(loads) == sum(sizes)
    if len(sizes) <= 6:
        best = min(
            max(sum(s for s, r in zip(sizes, split, strict=True) if r == rank) for rank in range(ranks))
            for split in itertools.product(range(ranks), repeat=len(sizes))
        )
        assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9
