"""The search finds the largest size that fits, and takes no other error for one of memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from trainer.optim.factories import adafactor, adamw, sgd
from trainer.optim.groups import make_optimizer
from trainer.optim.muon import Muon
from trainer.parallel.memory_search import bytes_of_step, drop_gradients, fails, fits_alongside, search, state_share
from trainer.parallel.strategy import SingleDevice

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    ("make", "share"), [(adamw, 2.0), (sgd, 1.0), (partial(sgd, momentum=0.0), 0.0), (adafactor, 0.0), (Muon, 2.0)]
)
def test_the_state_of_an_optimizer_is_measured(make, share):
    """Muon has less for hidden matrices than for embeddings."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert state_share(partial(make_optimizer, make), CPU) == pytest.approx(share, abs=0.01)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_is_float32_beside_weights_in_bf16():
    assert bytes_of_step(SingleDevice(nn.Linear(3, 2).bfloat16()), 2.0) == 2 * 8 + 2 * 4 * 8


def test_a_pass_is_tried_beside_what_a_step_has(monkeypatch):
    """Memory that the pass alone would leave is none. A rank has the state of the parameters that it steps."""
    held: list[int] = []
    strategy, empty = SingleDevice(nn.Linear(3, 2)), torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **kind: (held.append(size), empty(size, **kind))[1])
    assert bytes_of_step(strategy, 2.0) == 3 * 4 * (6 + 2)
    strategy.owned = [strategy.parameters[1]]
    assert bytes_of_step(strategy, 2.0) == 4 * (6 + 2) + 2 * 4 * 2
    assert fits_alongside(7, lambda: None, CPU) and held == [7]
    assert not fits_alongside(7, error(MemoryError, ""), CPU)


def test_gradients_of_a_failed_pass_are_dropped():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    drop_gradients(list(model.parameters()), CPU)
    assert model.weight.grad is None and model.bias.grad is None
