"""Optimizers: LAMB against the paper's algorithm in NumPy; what decays; a bucket's step is part of the whole step."""

import numpy as np
import pytest
import torch
from torch import nn

from trainer.optim.factories import adamw, lamb, sgd
from trainer.optim.groups import parameter_groups

MAKERS = {"adamw": adamw, "sgd": sgd, "lamb": lamb}


def plain_lamb(weights: list[np.ndarray], gradients: list[list[np.ndarray]], decays: list[float], lr: float) -> None:
    """You et al. 2020, algorithm 2, line by line, with phi(x) = x; in place."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    for w, gs, decay in zip(weights, gradients, decays):
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, g in enumerate(gs, start=1):
            m[...] = beta1 * m + (1 - beta1) * g
            v[...] = beta2 * v + (1 - beta2) * g * g
            r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
            update = r + decay * w
            lengths = np.sqrt((w * w).sum()), np.sqrt((update * update).sum())
            trust = lengths[0] / lengths[1] if lengths[0] > 0 and lengths[1] > 0 else 1.0
            w -= lr * trust * update


def test_lamb_is_the_papers():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(5, 3)), np.zeros((4, 4)), rng.normal(size=7), np.zeros(3)]
    gradients = [[rng.normal(size=w.shape) * 10.0 ** rng.integers(-3, 2) for _ in range(50)] for w in weights]
    gradients[2][0][:] = 0.0  # a bias without decay, and without an update at its first step
    decays = [0.1, 0.1, 0.0, 0.0]
    ours = [nn.Parameter(torch.tensor(w)) for w in weights]
    optimizer = lamb([{"params": ours[:2], "weight_decay": 0.1}, {"params": ours[2:], "weight_decay": 0.0}], lr=0.01)
    for step in range(50):
        for p, gs in zip(ours, gradients):
            p.grad = torch.tensor(gs[step])
        optimizer.step()
    plain_lamb(weights, gradients, decays, 0.01)
    for p, w in zip(ours, weights):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-10, atol=1e-12)


def test_no_decay_on_norms_and_biases():
    """A transformer layer: in and out projections and two linear layers decay; their biases and two norms do not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    decay, rest = parameter_groups(layer)
    names = {p: name for name, p in layer.named_parameters()}
    assert {names[p] for p in decay["params"]} == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight",
    }  # fmt: skip
    assert len(rest["params"]) == 8
    assert {names[p].rpartition(".")[2] for p in rest["params"]} == {"bias", "in_proj_bias", "weight"}
    assert len(decay["params"]) + len(rest["params"]) == len(names)


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.linear1.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(layer)) == 10
    assert len(parameter_groups(nn.LayerNorm(4))) == 1
    assert len(parameter_groups(nn.Linear(4, 4, bias=False))) == 1


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
