"""A rank makes a collective that the others don't: none waits for ever, and nothing of it gets into a checkpoint."""

import pytest
from troubled import IMPATIENT, events, trouble, whole

WEIGHTS = 756  # of the toy: what it makes could be taken for the gradients of a step


@pytest.mark.faults
@pytest.mark.parametrize("what", ["reduce 1", "begin 1", f"begin {WEIGHTS}"])
def test_33_a_collective_too_many(golden, tmp_path, what):
    """In step 7; step 8, whose gradients it meets, has a checkpoint."""
    result = trouble(what, tmp_path, IMPATIENT)
    assert result.code == 0, result.err
    assert len(events(tmp_path)) == 1 and result.out.count("resumed from ckpt/r/step-00000004") == 1
    whole(tmp_path, golden)
