"""Optimizers: what decays, in every type; a bucket's step is part of the whole step."""

import pytest
import torch
from torch import nn

from trainer.optim.factories import adamw, lamb, sgd
from trainer.optim.groups import parameter_groups

MAKERS = {"adamw": adamw, "sgd": sgd, "lamb": lamb}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_only_the_matrices_shrink_where_gradients_are_zero(maker):
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    nn.init.normal_(layer.norm1.bias)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = maker(parameter_groups(layer), lr=0.5, weight_decay=0.1)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in layer.named_parameters():
        factor = (0.5 if maker is lamb else 0.95) if p.dim() > 1 else 1.0  # LAMB's step has the length lr * |w|
        torch.testing.assert_close(p.detach(), before[name] * factor, msg=name)


def test_adamw_is_fused():
    assert [group["fused"] for group in adamw(parameter_groups(nn.Linear(4, 4))).param_groups] == [True, True]


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_goes_against_the_gradient_in_every_type(maker, dtype):
    p = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = maker([{"params": [p]}], lr=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p < 0.9).all()


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_stepping_bucket_by_bucket_is_stepping_at_once_bitwise(maker):
    """As overlap does it: the groups are replaced by a bucket's part of them, buckets come in any order."""
    torch.manual_seed(0)
    whole, parts = nn.TransformerEncoderLayer(8, 2, 24), nn.TransformerEncoderLayer(8, 2, 24)
    parts.load_state_dict(whole.state_dict())
    optimizers = [maker(parameter_groups(module), weight_decay=0.1) for module in (whole, parts)]
    ours = list(parts.parameters())
    for step in range(6):
        for p, q in zip(whole.parameters(), ours):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
        optimizers[0].step()
        everything = optimizers[1].param_groups
        order = torch.randperm(len(ours)).tolist()
        for start in range(0, len(ours), 5):
            bucket = {id(ours[i]) for i in order[start : start + 5]}
            groups = [{**group, "params": [p for p in group["params"] if id(p) in bucket]} for group in everything]
            optimizers[1].param_groups = [group for group in groups if group["params"]]
            optimizers[1].step()
        optimizers[1].param_groups = everything
        assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), ours)), step
