"""An optimizer with another step is the optimizer in all else."""

import torch

from trainer.optim.partial_step import OptimizerProxy


def test_all_but_the_step_is_the_optimizers():
    p, calls = torch.zeros(2, requires_grad=True), []
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9)
    proxy = OptimizerProxy(optimizer, lambda: calls.append("step"))
    p.grad = torch.ones(2)
    proxy.step()
    assert calls == ["step"] and p.tolist() == [0, 0] and not optimizer.state
    assert proxy.param_groups is optimizer.param_groups and proxy.state_dict() == optimizer.state_dict()
    proxy.zero_grad()
    assert p.grad is None
