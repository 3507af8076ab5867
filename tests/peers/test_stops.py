"""Peers: SIGTERM after step 6, to one rank that is not 0, and to torchrun, which passes it on to all."""

import os

import pytest
from support.peers import launch, saved, steps

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def test_sigterm_to_one_rank(peer, tmp_path):
    """None writes a checkpoint: all go on from step 4."""
    result = launch(peer, tmp_path, TROUBLE="SIGTERM 2 6", TIMEOUT_S="30")
    assert result.code == 0, result.err
    assert steps(tmp_path) == [[1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10, 11, 12]]
    if peer == "lightning":  # the others wait for rank 2 until the timeout of collectives
        assert "Received SIGTERM" in result.err and "imed out" in result.err


def test_sigterm_to_torchrun(peer, tmp_path):
    result = launch(peer, tmp_path, TROUBLE="agent 0 6")
    assert result.code == 1 and steps(tmp_path) == [[1, 2, 3, 4, 5, 6]]
    if peer == "lightning":  # it writes one, then the ranks hang until torchrun kills them: it is not the last
        assert os.readlink(tmp_path / "ckpt" / "last.ckpt") == "step=4.ckpt"
    else:
        assert saved(peer, tmp_path) == {4}
