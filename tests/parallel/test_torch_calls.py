"""Compares the short calls of torch with its public ones: the same bits, and all that hangs on these is called."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cli import environment
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from trainer.parallel import torch_calls
from trainer.parallel.torch_calls import backward, stepper, unwrapped

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "loop": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


def trained(make: Callable[..., Optimizer], short: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    step = stepper(optimizer) if short else optimizer.step
    for _ in range(4):
        loss = model(torch.randn(6, 8)).square().mean()
        (backward if short else Tensor.backward)(loss)
        step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()] + [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]


def test_this_torch_has_all_that_the_short_calls_need():
    assert torch_calls.FOUND
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    assert all(unwrapped(type(kind([nn.Parameter(torch.ones(1))]))) for kind in kinds)  # the first object is wrapped


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_the_public_calls(name):
    public, short = trained(OPTIMIZERS[name], False), trained(OPTIMIZERS[name], True)
    assert len(public) == len(short) and all(map(torch.equal, public, short))


@pytest.mark.parametrize("lacks", [False, True])
def test_an_optimizer_of_somebody_elses_makes_its_own_step(lacks, monkeypatch):
    monkeypatch.setattr(torch_calls, "FOUND", not lacks)

    class Own(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            self.steps += 1

    optimizer = Own([nn.Parameter(torch.ones(1))])
    stepper(optimizer)()
    assert optimizer.steps == 1
    if lacks:
        assert all(map(torch.equal, trained(OPTIMIZERS["sgd"], False), trained(OPTIMIZERS["sgd"], True)))


def test_hooks_that_come_later_are_called_and_a_replaced_step_is_made(monkeypatch):
    optimizer = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=1.0)
    step, calls = stepper(optimizer), list[str]()
    weight.grad = torch.ones(1)
    step()
    assert weight.item() == 0.0 and torch.is_grad_enabled()
    for name, register in (
        ("before", optimizer.register_step_pre_hook),
        ("after", optimizer.register_step_post_hook),
        ("each", register_optimizer_step_post_hook),
    ):
        hook = register(lambda *_, name=name: calls.append(name))
        step()
        hook.remove()
    optimizer.step = lambda *_: calls.append("replaced")
    step()
    del optimizer.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: calls.append("of the class"))
    step()
    assert calls == ["before", "after", "each", "replaced", "of the class"] and weight.item() == -3.0


def test_a_profile_shows_the_optimizers_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    step = stepper(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


class Noted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_subclasses_and_replaced_functions_see_the_pass(monkeypatch):
    weight = nn.Parameter(torch.ones(1))
    with Noted() as mode:
        backward((2 * weight).sum())
    assert Tensor.backward in mode.calls and weight.grad is not None and weight.grad.item() == 2.0

    class Own(Tensor):
        seen = False

        def backward(self, *args: Any, **kwargs: Any) -> None:
            Own.seen = True

    backward((2 * weight).sum().as_subclass(Own))
    assert Own.seen
    passes, public = list[Tensor](), Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda loss: (passes.append(loss), public(loss)))
    backward((2 * weight).sum())
    assert len(passes) == 1 and weight.grad.item() == 4.0


def test_anomalies_are_found_and_errors_are_torchs():
    weight = nn.Parameter(torch.zeros(1))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan values"):
        backward((weight.sqrt() * 0).sum())
    for loss in (torch.zeros(()), 2 * nn.Parameter(torch.ones(2))):
        with pytest.raises(RuntimeError) as public:
            loss.backward()
        with pytest.raises(RuntimeError) as short:
            backward(loss)
        assert str(short.value) == str(public.value)


STEPS = """
import sys, torch
from trainer.parallel.torch_calls import backward, defer_dynamo, stepper

defer_dynamo()
optimizer = torch.optim.AdamW([weight := torch.nn.Parameter(torch.ones(1))], lr=0.1)
step = stepper(optimizer)

def trained():
    backward(weight.square().sum())
    step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())

trained()
print("torch._dynamo" in sys.modules)

@torch.compile(backend="eager", fullgraph=False)
def cleared(x):
    optimizer.zero_grad()
    return x + 1

weight.grad = torch.ones(1)
cleared(torch.ones(1))
print(weight.grad)
print(torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable.__module__)
"""


def test_optimizers_need_no_dynamo_until_something_compiles():
    done = subprocess.run([sys.executable, "-c", STEPS], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["False", "None", "torch._dynamo.eval_frame"], done.stderr
