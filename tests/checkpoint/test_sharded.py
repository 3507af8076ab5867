"""Rows are cut as torch.chunk cuts them, and a state without sharded tensors stays as it is."""

import pytest
import torch

from trainer.checkpoint.sharded import is_sharded, local, parts_of, rows_like, span


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 17])
def test_rows_are_those_of_torchs_chunks(rows, ranks):
    whole = torch.arange(rows)
    chunks = list(whole.chunk(ranks))
    chunks += [whole[:0]] * (ranks - len(chunks))
    found = [whole[slice(*span(rows, rank, ranks))] for rank in range(ranks)]
    assert all(map(torch.equal, found, chunks)) and len(found) == ranks


def test_what_is_not_sharded_is_rank_0s():
    tensor = torch.ones(3)
    state = {"a": {"step": tensor, "n": 1}, "b": [1]}
    assert local(tensor) is tensor and not is_sharded(state)
    assert parts_of(state, 0) == state and parts_of(state, 1) == {"a": {}}
    assert rows_like(tensor, state) == state
