"""Slow kernels and warnings of torch: real ones on a CPU, where torch has them."""

import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks, stop
from torch import nn
from torch.nn import functional
from toy_recipe import Toy

from trainer.config.options import DataOptions, DDPOptions, Options
from trainer.monitors.advice import kernels
from trainer.monitors.advice.callback import Advice
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer


def attend(dropout: float) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 5, 8)
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)


def test_attention_on_the_math_kernel_is_counted():
    """On a CPU torch has no other kernel with dropout."""
    plain, found = functional.scaled_dot_product_attention, Counter[str]()
    heads = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    before = attend(0.1)
    with kernels.watch_attention(found):
        fast = attend(0.0)
        assert found["math_attention"] == 0
        assert torch.equal(attend(0.1), before) and found["math_attention"] == 1
        heads(*[torch.randn(2, 5, 8)] * 3, need_weights=False)
        with pytest.raises(TypeError):
            functional.scaled_dot_product_attention(1)  # pyright: ignore[reportCallIssue]
    assert found["math_attention"] == 2 and torch.equal(attend(0.0), fast)
    assert functional.scaled_dot_product_attention is plain


def test_warnings_are_counted_and_shown_as_before():
    found, undo = Counter[str](), ExitStack()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        show = warnings.showwarning
        kernels.watch_warnings(found, undo)
        for text in ("Grad strides do not match bucket view strides. This may ...", "something else"):
            warnings.warn(text, stacklevel=1)
        undo.close()
        assert warnings.showwarning is show
    assert found == {"copied_gradients": 1} and len(shown) == 2


class Odd(torch.autograd.Function):
    """Gives a gradient of (4, 3, 1, 1) the strides of a channels-last convolution."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.as_strided(grad.shape, (3, 1, 3, 3))


class Conv(nn.Module):
    def __init__(self, odd: bool, unused: bool) -> None:
        super().__init__()
        self.weight, self.odd = nn.Parameter(torch.ones(4, 3, 1, 1)), odd
        self.first = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(3)) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Odd.apply(self.weight) if self.odd else self.weight
        return functional.conv2d(self.first(x)[:, :, None, None], weight)[:, :, 0, 0]  # pyright: ignore


class Recipe(Toy):
    def __init__(self, odd: bool, unused: bool) -> None:
        super().__init__()
        self.made = odd, unused

    def model(self) -> nn.Module:
        return Conv(*self.made)


def warned(place: Place) -> list[list[str]]:
    """Of each case: what the real DDP gives."""
    found = []
    for case, (odd, unused) in enumerate([(False, False), (True, False), (False, True)]):
        advice = Advice()
        options = Options(max_steps=6, log_every_steps=2, ddp=DDPOptions(find_unused_parameters=not odd))
        trainer = Trainer(
            Recipe(odd, unused), {"advice": advice}, batch=12, options=options, data=DataOptions(workers=0),
            place=replace(place, store=f"{place.store}-{case}"),
        )  # fmt: skip
        trainer.fit()
        found.append(list(advice.said))
    return found


def test_ddp_that_copies_gradients_or_looks_for_nothing(tmp_path):
    stop()  # torch warns once in a process, and another test may have had it
    assert run_ranks(2, warned) == [[["unused_parameters"], ["gradient_layout"], []], [[], [], []]]


class Proxy(SimpleNamespace):
    """An optimizer inside a callback's."""


@pytest.mark.parametrize(
    ("optimizer", "groups", "fused"),
    [
        (adamw, 0, 0),
        (lambda p: torch.optim.SGD(p, 0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, 0.1, foreach=False), 1, 1),
        (lambda p: torch.optim.AdamW(p, foreach=False, fused=True), 0, 0),
        (lambda p: Proxy(optimizer=torch.optim.NAdam(p, foreach=False)), 1, 0),
    ],
)
def test_an_optimizer_that_loops(optimizer, groups, fused):
    made: Any = optimizer([nn.Parameter(torch.ones(3))])
    found = kernels.look(made, torch.device("cpu"), "fp32")
    assert found == {"kernel/looping_groups": groups, "kernel/fused_optimizer": fused}


@pytest.mark.parametrize(
    ("capability", "precision", "without"), [((8, 0), "fp32", 1.0), ((7, 5), "fp32", 0.0), ((9, 0), "tf32", None)]
)
def test_float32_on_a_gpu_with_tf32(capability, precision, without, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    groups = [{"params": [nn.Parameter(torch.ones(3))]}]
    found = kernels.look(adamw(groups), torch.device("cuda", 0), precision)
    assert found.get("kernel/without_tf32") == without


def test_cuts_of_graphs_are_counted(monkeypatch):
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.utils, "counters", {"graph_break": {"one": 3, "other": 1}})
    assert kernels.graph_breaks() == 2.0
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert kernels.graph_breaks() == 0.0
