"""Two versions of a stage's weights, for backward passes that run after a step (PipeDream-2BW)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Version:
    """The weights that the passes of one batch use."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.leaves = [nn.Parameter(p.data) for p in parameters]
        self.apart = False  # whether the parameters have other memory by now


class WeightVersions:
    """The parameters have the newest weights; passes of the previous batch use the weights of their version.

    A step must not change tensors that backward passes still need. `part` therefore gives the parameters other memory,
    so each weight is in memory at most twice.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        index = {id(p): i for i, p in enumerate(parameters)}
        self.parameters = parameters
        self.places = [
            (module, name, index[id(p)])
            for module in model.modules()
            for name, p in module._parameters.items()
            if id(p) in index
        ]
        self.used: Sequence[nn.Parameter] = parameters
        self.spare: list[Tensor] = []  # memory that no version uses

    def use(self, leaves: Sequence[nn.Parameter]) -> None:
        """Put these into the model, in place of the parameters."""
        if leaves is not self.used:
            for module, name, i in self.places:
                module._parameters[name] = leaves[i]
            self.used = leaves

    @torch.no_grad()
    def part(self, version: Version) -> None:
        """Leave the parameters' memory to the version, and give them other memory with the same weights."""
        memory = self.spare or [torch.empty_like(p) for p in self.parameters]
        torch._foreach_copy_(memory, list(self.parameters))
        for p, new in zip(self.parameters, memory, strict=True):
            p.data = new
        self.spare, version.apart = [], True

    def release(self, version: Version) -> None:
        """Give the gradients to the parameters, because no pass needs the version any more."""
        for p, leaf in zip(self.parameters, version.leaves, strict=True):
            p.grad = leaf.grad
        if version.apart:
            self.spare = [leaf.data for leaf in version.leaves]
