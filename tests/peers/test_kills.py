"""Peers: kill -9 of a rank after step 7, and in the middle of the checkpoint of step 8."""

import pytest
from support.peers import launch, off, samples, saved, steps

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def test_a_rank_is_killed(peer, golden, tmp_path):
    """All go on from step 4, with the samples that were planned; but no peer to the same bits."""
    result = launch(peer, tmp_path, TROUBLE="SIGKILL 1 7")
    assert result.code == 0, result.err
    assert steps(tmp_path) == [[1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12]]
    assert samples(tmp_path) == samples(golden)
    assert 0 < off(tmp_path, golden) < 1e-6


def test_rank_0_is_killed_while_it_writes(peer, golden, tmp_path):
    result = launch(peer, tmp_path, TROUBLE="cut 0 7")
    assert "-25" in result.err  # SIGXFSZ
    assert steps(tmp_path)[0][:7] == [1, 2, 3, 4, 5, 6, 7]
    if peer == "accelerate":  # the half checkpoint is the newest at each start
        assert result.code == 1 and len(steps(tmp_path)) == 1 and saved(peer, tmp_path) == {4, 8}
        return
    assert result.code == 0, result.err
    assert steps(tmp_path)[1:] == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert samples(tmp_path) == samples(golden) and 0 < off(tmp_path, golden) < 1e-6
