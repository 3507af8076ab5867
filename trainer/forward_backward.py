"""The losses of a step's micro-batches, weighed so that the mean over ranks is exact."""

import torch
from torch import Tensor, nn

from trainer.errors import DataError


def share(loss: Tensor, ours: int, total: int) -> Tensor:
    """A mean over `ours / world` items, scaled so that DDP's mean over ranks is the mean over all `total` items."""
    if ours == total:
        return loss
    return loss / (total / ours) if ours else loss * 0.0


def no_loss(parameters: list[nn.Parameter], unused: bool) -> Tensor:
    """Zero, with a gradient of zero for each parameter: for a micro-batch of no items, whose mean may be NaN."""
    if unused:
        raise DataError(
            "a micro-batch of weight 0: DDP can't leave it out with trainer.ddp.find_unused_parameters=true; "
            "set that to false, or give every micro-batch something to count"
        )
    return torch.stack([p.sum().float() for p in parameters]).sum() * 0.0
