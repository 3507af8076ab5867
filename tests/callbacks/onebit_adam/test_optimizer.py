"""1-bit Adam's mean of signs loses nothing of what it is given, and steps with a frozen variance keep their length."""

from typing import Any

import numpy as np
import pytest
import torch
from support.quick import quick
from support.ranks import run_ranks
from torch import nn

from trainer.callbacks.onebit_adam.optimizer import OneBit, SignedMean
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Residuals
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.process.environment import Place


def ledger(place: Place, shapes: list[int], steps: int) -> dict[str, Any]:
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    generator = torch.Generator().manual_seed(place.rank)
    params = [torch.empty(n, dtype=torch.float64) for n in shapes]
    mean = SignedMean(
        AllReduce(ranks.new_group()), Bucket.of(params, 0), params[0].new_empty(0), Residuals(), Residuals()
    )
    given = came = torch.zeros(sum(shapes), dtype=torch.float64)
    for _ in range(steps):
        vector = torch.randn(sum(shapes), generator=generator, dtype=torch.float64)
        given, came = given + vector, came + mean(vector.clone())
    ranks.close()
    return {"given": given, "came": came, "worker": mean.worker_error, "server": mean.server_error}


@pytest.mark.parametrize(("world", "rounding"), quick([(3, 2e-6), (2, 1e-12)]))  # a third is rounded to float32
@pytest.mark.parametrize("shapes", [[300, 7, 1, 50], [1], [2, 2]])
def test_what_came_and_both_errors_are_what_was_given(shapes, world, rounding):
    """Also where shards are uneven or empty, and parameters are cut."""
    ranks = run_ranks(world, ledger, shapes, 50)
    given, worker = (torch.stack([rank[key] for rank in ranks]).mean(0) for key in ("given", "worker"))
    server = torch.cat([rank["server"] for rank in ranks])
    torch.testing.assert_close(ranks[0]["came"] + worker + server, given, rtol=0, atol=rounding)
    assert all(torch.equal(rank["came"], ranks[0]["came"]) for rank in ranks)
    assert worker.norm() + server.norm() > 0
    assert worker.abs().max() < 30  # they stay bounded


def alone(place: Place) -> dict[str, Any]:
    """Two ranks with gradients by hand: constant ones, none, and one that begins after the warm-up."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    even, late, unused = (nn.Parameter(torch.zeros(2, 4)) for _ in range(3))
    optimizer = torch.optim.AdamW([even, late, unused], lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    onebit = OneBit(optimizer)
    gradient = torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]])
    steps: dict[str, list[Any]] = {"even": [], "late": [], "unused": []}
    for step in range(6):
        even.grad, late.grad = gradient.clone(), torch.zeros(2, 4)
        late.grad[0] = 1.0
        late.grad[1, 0] = step >= 3
        unused.grad = gradient.clone() if step < 3 else None
        if step == 3:
            onebit.freeze(0, AllReduce(ranks.new_group()), Residuals(), Residuals())
        before = [p.detach().clone() for p in (even, late, unused)]
        onebit.step()
        for key, p, old in zip(steps, (even, late, unused), before, strict=True):
            steps[key].append((p.detach() - old).numpy())
    ranks.close()
    before = even.detach().clone()
    even.grad, late.grad, unused.grad = gradient, None, None
    optimizer.step()
    return steps | {"after": (even.detach() - before).numpy()}


def test_steps_do_not_jump_where_the_warm_up_ends():
    """Of a constant gradient, whose signs are all of it, each step of Adam is as long as the learning rate; without its
    bias corrections the first after the warm-up would be 6 times as long."""
    for steps in run_ranks(2, alone):
        np.testing.assert_allclose(np.abs(steps["even"]), 0.1, rtol=1e-4)
        assert (np.abs(steps["after"]) <= 0.1).all()  # AdamW's own, which goes on alone; else 1.4 times as long
        # The momentum decays where this rank has no gradient; what had no variance stays where it is.
        np.testing.assert_allclose(np.abs(steps["unused"][3]), 0.1 * 0.9 * (1 - 0.9**3) / (1 - 0.9**4), rtol=1e-4)
        assert np.abs(steps["late"])[:, 0].min() > 0
        assert np.abs(steps["late"])[:, 1].max() == 0
