"""What the step of other people's optimizers needs and keeps: known before the run, saved, or refused by name."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.messages import refuses
from torch import nn
from torch.optim import Optimizer
from toy_recipe import Toy

from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.optim.probe import probe, put_kept, refuse_coupled, steps_of
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Distance(Optimizer):
    """The groups have a step size from the gradients of all parameters, as Prodigy's and D-Adaptation's have."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "d": d0, "d0": d0, "k": 0, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        size, grads = self.param_groups[0]["d"], 0.0
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            start = self.state[p].setdefault("start", p.clone())
            grads += float((p.grad * (start - p)).sum())
        for group in self.param_groups:
            group["sum"] += grads
            group["d"], group["k"] = max(size, group["d0"] + abs(group["sum"])), group["k"] + 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad.sign(), alpha=size * group["lr"] / math.sqrt(group["k"]))


class Counter(Optimizer):
    """Counts the steps of a group for its warm-up, as schedule-free optimizers do, and the calls in itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] * min(group["k"], self.calls) / 10)


class SAM(Optimizer):
    """As published: the closure has a default, and is asserted."""

    def __init__(self, params: Any, base: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.base = base(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class Signs(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.sub_(p.grad.sign(), alpha=0.1)


def made(kind: Any) -> Any:
    optimizer = kind([{"params": [nn.Parameter(torch.ones(3, 4))]}, {"params": [nn.Parameter(torch.ones(4))]}])
    probe(optimizer)
    return optimizer


def trained(make: Any, steps: int, callbacks: Any = (), **options: Any) -> Trainer:
    own = Options(max_steps=steps, run_dir="runs/r", **options)
    trainer = Trainer(
        Toy(), callbacks, make, batch=12, options=own, data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4)
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("kind", "kept", "coupled"),
    [
        (Distance, {"group.d", "group.k", "group.sum"}, True),
        (Counter, {"group.k", "own.calls"}, False),
        (Signs, set(), False),
        (torch.optim.Adam, set(), False),
    ],
)
def test_what_a_step_changes_in_groups_and_in_the_optimizer_is_found(kind, kept, coupled):
    optimizer = made(kind)
    assert (set(steps_of(optimizer).kept), steps_of(optimizer).coupled) == (kept, coupled)
    assert not optimizer.state
    assert all(group.get("k", 0) == 0 for group in optimizer.param_groups)  # the copy has stepped, and not itself


def test_a_step_that_asserts_a_closure_is_refused_before_the_run():
    with refuses("optimizer", "SAM.step()", "closure", "adamw"):
        trained(partial(SAM, base=torch.optim.SGD), 1)


@pytest.mark.parametrize("kind", [Distance, Counter])
def test_numbers_of_groups_are_in_checkpoints(kind, tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = trained(kind, 6)
    monkeypatch.chdir(tmp_path)
    trained(kind, 3)
    resumed = trained(kind, 6, resume="auto")
    for own, other in zip(whole.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert {**own, "params": 0} == {**other, "params": 0}
        assert own["k"] == 6
    assert getattr(whole.optimizer, "calls", 6) == getattr(resumed.optimizer, "calls", 6) == 6
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name


@pytest.mark.parametrize(
    ("kind", "by_parameter", "words"),
    [
        (Distance, False, "takes all parameters into account"),
        (Counter, True, "changes calls, k of all parameters"),
    ],
)
def test_a_callback_that_steps_some_parameters_at_a_time_refuses_it(kind, by_parameter, words):
    with pytest.raises(ConfigError, match=rf"^callbacks\.x: the step of {kind.__name__} {words}"):
        refuse_coupled(made(kind), "callbacks.x", by_parameter)
    refuse_coupled(made(Counter), "callbacks.shard")  # a rank has its parameters in groups that stay
    refuse_coupled(made(Signs), "callbacks.overlap", by_parameter=True)


def test_a_run_with_such_a_callback_is_refused():
    with refuses("callbacks.optimizer_in_backward", "Distance"):
        trained(Distance, 1, [OptimizerInBackward()])


def test_a_strangers_checkpoint_sets_no_other_attribute():
    optimizer = made(Counter)
    group, state = optimizer.param_groups[0], {"own.step": 1, "own.calls": 7, "group.params": 2}
    put_kept(optimizer, group, state)
    assert optimizer.calls == 7 and callable(optimizer.step) and isinstance(group["params"], list)
    assert state == {"own.step": 1, "group.params": 2}
