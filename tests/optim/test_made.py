"""What a function of the user's may return as an optimizer: anything that no run can train or save with is one line."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from toy_recipe import Toy

from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

OTHER = nn.Linear(3, 5)


class WithoutRate(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Counts(SGD):
    """Keeps a number of its own in its state, once it has stepped."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = {"step": 1}
        return super().step(closure)


def counts_at_once(groups: Any) -> Optimizer:
    made = SGD(groups, lr=0.1)
    made.state["calls"] = {"step": 0}
    return made


def copies(groups: Any) -> Optimizer:
    return SGD([p.detach() for group in groups for p in group["params"]], lr=0.1)


def two(groups: Any) -> Any:
    return SGD(groups, lr=0.1), None


def trained(make: Any, steps: int = 2) -> Trainer:
    options = Options(max_steps=steps, log_every_steps=1)
    trainer = Trainer(
        Toy(), {}, make, batch=12, options=options, data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4)
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda groups: None, r"the function returned None; return an optimizer"),
        (lambda groups: SGD, r"the function returned the class SGD; return"),
        (two, r"the function returned a tuple; return"),
        (lambda groups: SGD(OTHER.parameters(), lr=0.1), r"SGD has a tensor of shape \(5, 3\), which is no parameter"),
        (copies, r"SGD has a tensor of shape \(16, 8\), which is no parameter of the model that trains"),
        (WithoutRate, r"WithoutRate\.param_groups\[0\]\['lr'\] is None; give a"),
        (partial(AdamW, lr=torch.ones(1)), r"\w+\.param_groups\[0\]\['lr'\] is a Tensor of shape"),
        (partial(SGD, lr=float("nan")), r"\w+\.param_groups\[0\]\['lr'\] is nan; give a"),
        (partial(SGD, lr=True), r"\w+\.param_groups\[0\]\['lr'\] is True; give a"),
        (counts_at_once, r"SGD\.state has 'calls', which is none of its parameters"),
        (partial(Counts, lr=0.1), r"Counts\.state has 'calls', which is none of its parameters"),
    ],
)
def test_one_line_before_any_checkpoint(make, line):
    with pytest.raises(ConfigError, match=rf"^optimizer: {line}"):
        trained(make)


@pytest.mark.parametrize("lr", [torch.tensor(0.25), np.float32(0.25), np.array(0.25)])
def test_a_rate_of_another_kind_of_number_trains_as_the_number_does(lr):
    other, plain = (trained(partial(SGD, lr=value)) for value in (lr, 0.25))
    pairs = zip(other.module.parameters(), plain.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert type(other.optimizer.param_groups[0]["lr"]) is float
