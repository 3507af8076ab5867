"""Some parameters are stepped alone, by the settings that were noted."""

import torch
from torch import nn

from trainer.optim.partial_step import PartialStep


def params(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2, 3), value)) for value in values]


def test_some_are_stepped_alone_by_the_settings_that_were_noted():
    a, b, c = params(1.0, 1.0, 1.0)
    optimizer = torch.optim.SGD([{"params": [a, b]}, {"params": [c], "lr": 0.5}], lr=0.1)
    groups, steps = optimizer.param_groups, PartialStep(optimizer)
    steps.note()
    for group in groups:
        group["lr"] = 100.0  # of the next step
    steps.step({p: torch.full_like(p, 2.0) for p in (c, a)})
    for p, value in ((a, 0.8), (b, 1.0), (c, 0.0)):
        torch.testing.assert_close(p.detach(), torch.full((2, 3), value))
        assert p.grad is None
    assert optimizer.param_groups is groups


def test_autograd_sees_a_fused_step():
    """Else a weight that is used too soon would be no error."""
    (p,) = params(1.0)
    steps, version = PartialStep(torch.optim.AdamW([p], fused=True)), p._version
    steps.note()
    steps.step({p: torch.ones_like(p)})
    assert p._version > version and not torch.equal(p, torch.ones(2, 3))
