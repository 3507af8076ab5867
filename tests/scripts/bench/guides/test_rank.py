"""A rank that is held to half a core, and a loop that reduces after each micro-batch."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.bench.guides import rank
from scripts.bench.guides.rank import ACCUMULATE, MICRO


def test_a_held_rank_sleeps_as_long_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, used = list[float](), iter([10.0, 13.0, 13.5])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    monkeypatch.setattr(time, "sleep", slept.append)
    recipe = SimpleNamespace(loss=lambda model, batch: batch + 1)
    rank.hold(recipe, 0.5)
    assert recipe.loss(None, 2) == 3 and slept == [3.0]  # seconds of CPU since it was held


def test_micro_batches_that_are_reduced_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is that of all samples of its micro-batches at once."""
    monkeypatch.setattr(rank, "join", lambda place: None)
    monkeypatch.setattr(rank, "DistributedDataParallel", lambda module: module)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    module = torch.nn.Linear(3, 1)
    whole = torch.nn.Linear(3, 1)
    whole.load_state_dict(module.state_dict())
    whole(x[: ACCUMULATE * MICRO]).square().mean().backward()
    torch.optim.SGD(whole.parameters(), 0.1).step()
    monkeypatch.setattr(rank, "build", lambda recipe: (module, torch.optim.SGD(module.parameters(), 0.1)))
    recipe: Any = SimpleNamespace(
        data=lambda split: [{"x": part} for part in x.split(10)],
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=10,
    )
    steps: Any = range(1)
    unused: Any = None
    rank.each_reduced(unused, recipe, unused, steps)
    torch.testing.assert_close(module.weight, whole.weight)
