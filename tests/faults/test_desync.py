"""A rank makes a collective that the others don't: none waits for ever, and nothing of it gets into a checkpoint."""

import pytest
from support.faults import IMPATIENT, events, recorded, resumed, trouble, whole

WEIGHTS = 756  # of the toy: what it makes could be taken for the gradients of a step


@pytest.mark.slow
@pytest.mark.parametrize("what", ["reduce 1", "begin 1", f"begin {WEIGHTS}"])
def test_33_a_collective_too_many(golden, tmp_path, what):
    """In step 7; step 8, whose gradients it meets, has a checkpoint."""
    result = trouble(what, tmp_path, IMPATIENT)
    assert result.code == 0, result.err
    assert len(events(tmp_path)) == 1 and resumed(result.out) == [4]
    whole(tmp_path, golden)
    recorded(tmp_path, 0, 2)
    if what == "reduce 1":  # else gloo may have aborted the rank
        assert "rank 1 made another collective than the others: gloo:all_reduce of [[1]], ['Float'];" in result.err
