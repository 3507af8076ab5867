"""A second model in the layout of the trained one, for an average of its weights."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from trainer.comm.slices import local
from trainer.parallel.placeholder import Placeholder
from trainer.parallel.strategy import Strategy


class AveragedModel:
    """A copy of the trained model that averages its weights. Creating it is a collective.

    `module` is the copy, without gradients. Memory: one copy of the model on its device.
    """

    def __init__(self, strategy: Strategy, trained: nn.Module) -> None:
        self.trained, self.module = trained, strategy.copy().requires_grad_(False)
        self.average = own_parts(self.module)

    @torch.no_grad()
    def update(self, share: float) -> None:
        """Set average = (1 - share) * average + share * weights, and copy the buffers."""
        torch._foreach_lerp_(self.average, own_parts(self.trained), share)  # parameters may have moved
        self.copy_buffers()

    @torch.no_grad()
    def copy_buffers(self, skipped: Collection[nn.Module] = ()) -> None:
        """Copy all buffers, also ones that a forward pass created or resized, except those of some layers."""
        own, given = list(self.module.buffers()), list(self.trained.buffers())
        if [(b.shape, b.dtype) for b in own] != [(b.shape, b.dtype) for b in given]:
            for copy, module in zip(self.module.modules(), self.trained.modules(), strict=True):
                if copy not in skipped:
                    new = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
                    copy._buffers.update(new)
            return
        kept = {id(b) for layer in skipped for b in layer.buffers()}
        if pairs := [pair for pair in zip(own, given, strict=True) if id(pair[0]) not in kept]:
            torch._foreach_copy_([copy for copy, _ in pairs], [b for _, b in pairs])


def own_parts(model: nn.Module) -> list[Tensor]:
    """List this rank's parts of the parameters."""
    return [local(p.detach()) for p in model.parameters() if not isinstance(p, Placeholder)]
