"""Peers: a resume in the middle of an epoch, on fewer ranks with the same batch, and with dropout."""

from collections import Counter

import pytest
from support.peers import launch, off, samples, steps, stopped_at

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

# Of the 48 samples that are left of the epoch after step 4, those that come a second time: as many never come.
REPEATED_ON_TWO = {"lightning": 16, "accelerate": 0, "dcp": 16}


def test_on_two_ranks(peer, golden, tmp_path):
    stopped_at(4, peer, golden, tmp_path)
    result = launch(peer, tmp_path, ranks=2, restarts=0)
    assert result.code == 0, result.err
    assert steps(tmp_path) == [[5, 6, 7, 8, 9, 10, 11, 12]]
    planned, given = samples(golden), samples(tmp_path, ranks=2)
    epoch = [*(planned[step] for step in range(1, 5)), *(given[step] for step in range(5, 9))]
    seen = Counter(number for numbers in epoch for number in numbers)
    assert sum(count - 1 for count in seen.values()) == REPEATED_ON_TWO[peer] == 96 - len(seen)
    assert (given == {step: planned[step] for step in given}) == (peer == "accelerate")


def test_with_dropout(peer, tmp_path):
    """None gives the random numbers that would have come, though Accelerate saves its generators' states."""
    (straight := tmp_path / "straight").mkdir()
    (resumed := tmp_path / "resumed").mkdir()
    assert launch(peer, straight, DROPOUT="0.1").code == 0
    stopped_at(4, peer, straight, resumed)
    assert launch(peer, resumed, restarts=0, DROPOUT="0.1").code == 0
    assert samples(resumed) == {step: numbers for step, numbers in samples(straight).items() if step > 4}
    assert off(resumed, straight) > 1e-6
    assert len(list(resumed.glob("ckpt/step_4/random_states_*.pkl"))) == (3 if peer == "accelerate" else 0)
