"""Optimizers: what decays, in every type; a bucket's step is part of the whole step; ranges of settings."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.messages import refuses
from torch import nn
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.optim.factories import adafactor, adagrad, adamw, adamw8bit, lamb, lars, sgd
from trainer.optim.groups import parameter_groups
from trainer.optim.muon import Muon

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": adamw, "sgd": sgd, "lamb": lamb, "lars": lars, "adafactor": adafactor, "adagrad": adagrad,
    "muon": Muon,
    "adamw8bit": partial(adamw8bit, min_8bit_size=64),
}  # fmt: skip
each = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def make(maker: Callable[..., Optimizer], module: nn.Module, **settings: Any) -> Optimizer:
    return maker(parameter_groups(module, by_hidden=maker is Muon), **settings)


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 24)


@each
def test_only_the_matrices_shrink_where_gradients_are_zero(maker):
    module = layer()
    nn.init.normal_(module.norm1.bias)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = make(maker, module, lr=0.5, weight_decay=0.1)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in module.named_parameters():
        factor = (0.5 if maker is lamb else 0.95) if p.dim() > 1 else 1.0  # LAMB's step has the length lr * |w|
        expected = before[name] * factor
        if maker is adagrad and p.dim() > 1:
            expected = before[name] - 0.5 * before[name].sign()  # its decay is part of the gradient, which it divides
        torch.testing.assert_close(p.detach(), expected, msg=name)


def test_adamw_is_fused():
    assert [group["fused"] for group in adamw(parameter_groups(nn.Linear(4, 4))).param_groups] == [True, True]


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_goes_against_the_gradient_in_every_type(maker, dtype):
    p = nn.Parameter(torch.ones(16, 16, dtype=dtype))
    group = {"params": [p], **({"hidden": True} if maker is Muon else {})}
    if maker is MAKERS["adamw8bit"] and dtype == torch.float64:
        with refuses("optimizer=adamw8bit", "torch.float64", "optimizer=adamw"):
            maker([group])
        return
    optimizer = maker([group], lr=50.0 if maker is lars else 0.5)  # a step of 0.001 of the length at rate 1
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p.mean() < 0.99) and (p < 1.0).all()


@each
def test_stepping_bucket_by_bucket_is_stepping_at_once_bitwise(maker):
    """As overlap does it: the groups are replaced by a bucket's part of them, buckets come in any order."""
    whole, parts = layer(), layer()
    optimizers = [make(maker, module, weight_decay=0.1) for module in (whole, parts)]
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


@each
def test_a_parameter_without_a_gradient_has_no_state_and_stays(maker):
    """As with a sharded state, of which each rank steps some of the parameters: together they are the whole step."""
    whole, ranks = layer(), [layer() for _ in range(3)]
    optimizers = [make(maker, module) for module in (whole, *ranks)]
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in whole.parameters()]
        for r, (module, optimizer) in enumerate(zip((whole, *ranks), optimizers), start=-1):
            params = list(module.parameters())
            before = [p.detach().clone() for p in params]
            for i, p in enumerate(params):
                p.grad = gradients[i].clone() if r in (-1, i % 3) else None
            optimizer.step()
            others = [i for i in range(len(params)) if r not in (-1, i % 3)]
            assert all(torch.equal(params[i], before[i]) for i in others)
            if maker is not adagrad:  # torch's has its state from the start
                assert not any(optimizer.state.get(params[i]) for i in others)
        for r, module in enumerate(ranks):
            for i, (own, p, q) in enumerate(zip(module.parameters(), whole.parameters(), ranks[r].parameters())):
                assert i % 3 != r or (torch.equal(own, p) and own is q)


@each
def test_a_step_that_fp16s_scaler_skips_leaves_no_trace(maker):
    skipped, fresh = layer(), layer()
    optimizers = [make(maker, module) for module in (skipped, fresh)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for bad in (True, False):
        for p in skipped.parameters():
            p.grad = torch.full_like(p, torch.inf) if bad else torch.full_like(p, scaler.get_scale() * 0.5)
        scaler.scale(torch.ones(1))
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        if bad:
            assert all(torch.equal(p, q) for p, q in zip(skipped.parameters(), fresh.parameters()))
    for p in fresh.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizers[1].step()
    assert all(torch.equal(p, q) for p, q in zip(skipped.parameters(), fresh.parameters()))
    steps = [{float(s["step"]) for s in o.state.values() if "step" in s} for o in optimizers]
    assert steps[0] == steps[1]


RANGES = [
    *((name, {"lr": -1}, r"lr=-1: must be more than 0") for name in MAKERS),
    *((name, {"weight_decay": -1}, r"weight_decay=-1: must be at least 0") for name in MAKERS),
    *(
        (name, {"betas": (0.9, 1.0)}, r"betas\.1=1\.0: must be less than 1")
        for name in ("adamw", "lamb", "adamw8bit", "muon")
    ),
    *((name, {"eps": -1.0}, r"eps=-1\.0: must be at least 0") for name in ("adamw", "lamb", "adamw8bit", "muon")),
    ("sgd", {"momentum": -0.1}, r"momentum=-0\.1: must be at least 0"),
    ("lars", {"momentum": 1.0}, r"momentum=1\.0: must be less than 1"),
    ("lars", {"trust_coefficient": 0}, r"trust_coefficient=0: must be more than 0"),
    ("adagrad", {"lr_decay": -1.0}, r"lr_decay=-1\.0: must be at least 0"),
    ("adagrad", {"eps": -1.0}, r"eps=-1\.0: must be at least 0"),
    ("adafactor", {"beta2_decay": 0.8}, r"beta2_decay=0\.8: must be at most 0"),
    ("adafactor", {"eps": (None, -1.0)}, r"eps\.1=-1\.0: must be at least 0"),
    ("adafactor", {"d": 0.5}, r"d=0\.5: must be at least 1"),
    ("adamw8bit", {"min_8bit_size": 0}, r"min_8bit_size=0: must be at least 1"),
    ("muon", {"momentum": 1.0}, r"momentum=1\.0: must be less than 1"),
    ("muon", {"ns_steps": 0}, r"ns_steps=0: must be at least 1"),
    ("muon", {"ns_steps": 100}, r"ns_steps=100: must be less than 100"),
    ("muon", {"adjust_lr_fn": "none"}, r"adjust_lr_fn=none: must be match_rms_adamw or original"),
    ("muon", {"adamw_lr": -1.0}, r"adamw_lr=-1\.0: must be at least 0"),
]


@pytest.mark.parametrize(("name", "settings", "told"), RANGES, ids=str)
def test_a_setting_out_of_range_is_refused_with_the_range(name, settings, told):
    with pytest.raises(ConfigError, match=rf"^optimizer\.{told}"):
        make(MAKERS[name], layer(), **settings)


def test_without_bitsandbytes_the_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "trainer.optim.adamw8bit", None)
    with refuses("optimizer=adamw8bit", "pip install 'bitsandbytes>=0.50"):
        adamw8bit(parameter_groups(layer()))
