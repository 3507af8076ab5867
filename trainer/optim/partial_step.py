"""Steps some of an optimizer's parameters at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.comm.phases import Phase, during


class PartialStep:
    """Steps some parameters at a time. The optimizer's step must be a function of each parameter alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def note(self) -> None:
        """Record the groups' current settings, such as learning rates, for later steps."""
        self.settings = [{**group, "params": []} for group in self.optimizer.param_groups]

    @during(Phase.OPTIMIZER)
    def step(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Step these parameters by their gradients, and free the gradients."""
        groups = [{**group, "params": []} for group in self.settings]
        for p, gradient in gradients.items():
            p.grad = gradient
            groups[self.group_of[p]]["params"].append(p)
        everything = self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in groups if group["params"]]
        self.optimizer.step()
        self.optimizer.param_groups = everything
        torch.autograd.graph.increment_version(list(gradients))  # fused steps don't; autograd must see the change
        torch.clear_autocast_cache()
        for p in gradients:
            p.grad = None


class OptimizerProxy:
    """Acts as `optimizer`, but with another `step`."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        self.optimizer, self.step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
