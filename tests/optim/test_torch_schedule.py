"""Rates by torch's schedulers, against an optimizer that steps with them, and from any step on."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, SequentialLR

from trainer.optim.torch_schedule import FOLLOWS, TorchRate

STEPS = 12


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "lr": 0.3}], lr=0.1, momentum=0.9)


MAKE = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.5, 0.7], total_steps=STEPS + 1),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
    "sequence": lambda o: SequentialLR(o, [ExponentialLR(o, 0.5), CosineAnnealingLR(o, 4)], [5]),
}


def reference(name: str) -> list[list[tuple[float, float]]]:
    optimizer = sgd()
    scheduler, found = MAKE[name](optimizer), []
    for _ in range(STEPS):
        found.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("first", [0, 7])
def test_groups_get_what_the_schedulers_give(name, first):
    optimizer = sgd()
    peaks = [group["lr"] for group in optimizer.param_groups]
    scheduler = MAKE[name](optimizer)
    rate = TorchRate(optimizer, lambda done: [scheduler.step])
    if name == "one cycle":  # which has set other rates as it was made
        peaks = [group["initial_lr"] for group in optimizer.param_groups]
    groups = [{"lr": peak, "momentum": 0.9, FOLLOWS: i} for i, peak in enumerate(peaks)]
    for step, expected in list(enumerate(reference(name)))[first:]:
        rate.put(step, groups, peaks)
        assert [(group["lr"], group["momentum"]) for group in groups] == expected


def test_a_group_with_a_rate_of_its_own_keeps_its_ratio():
    optimizer = sgd()
    scheduler = ExponentialLR(optimizer, 0.5)
    groups = [{"lr": 4.0}]
    TorchRate(optimizer, lambda done: [scheduler.step]).put(3, groups, [4.0])
    assert groups == [{"lr": 0.5}]
