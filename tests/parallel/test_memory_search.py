"""The search finds the largest size that fits, and takes no other error for one of memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer.parallel.memory_search import HELD, drop_gradients, fails, fits_beside_state, search


@pytest.mark.parametrize("most", [1, 2, 7, 32])
@pytest.mark.parametrize("first", [1, 3, 8])
def test_the_search_finds_the_largest_size(most, first):
    for limit in range(most + 3):
        probes: list[int] = []
        found = search(min(first, most), most, lambda size, limit=limit: probes.append(size) or size <= limit)  # noqa: B023
        assert (found[-1] if found else 0) == min(limit, most)
        assert len(set(probes)) == len(probes) <= 2 * most.bit_length() + 1


def error(kind: type[Exception], text: str) -> Callable[[], Any]:
    def run() -> None:
        raise kind(text)

    return run


def test_other_errors_are_none_of_memory():
    assert fails(error(torch.OutOfMemoryError, "")) and fails(error(MemoryError, ""))
    assert fails(error(RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not fails(lambda: None)
    with pytest.raises(RuntimeError, match="shapes"):
        fails(error(RuntimeError, "shapes"))


def test_a_pass_is_tried_beside_the_gradients_and_moments_of_a_step(monkeypatch):
    """Memory that the pass alone would leave is none."""
    held: list[int] = []
    model, empty = nn.Linear(3, 2), torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **kind: (held.append(size), empty(size, **kind))[1])
    assert fits_beside_state(lambda: None, list(model.parameters())) and held == [HELD * 6, HELD * 2]
    assert not fits_beside_state(error(MemoryError, ""), list(model.parameters()))


def test_gradients_of_a_failed_pass_are_dropped():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    drop_gradients(list(model.parameters()), torch.device("cpu"))
    assert model.weight.grad is None and model.bias.grad is None
