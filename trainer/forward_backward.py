"""The forward and backward passes of a step, micro-batch by micro-batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from trainer.data.batch import Step
from trainer.errors import DataError
from trainer.parallel.strategy import Strategy
from trainer.recipe_checks import CheckedLoss

# (a step's data, a function that waits for the total weight) -> the losses of the micro-batches.
# Afterwards the parameters have the gradients, reduced over ranks.
ForwardBackward = Callable[[Step, Callable[[], int]], list[Tensor]]


class Accumulate:
    """Forward and backward passes of one micro-batch after another. The last one reduces the sum of the gradients.

    Args:
        loss: `recipe.loss`, under autocast if the precision has it.
        unused: DDP looks for unused parameters, so no micro-batch can have weight 0.
    """

    def __init__(self, loss: CheckedLoss, strategy: Strategy, scaler: GradScaler, unused: bool) -> None:
        self.loss, self.strategy, self.scaler, self.unused = loss, strategy, scaler, unused

    def __call__(self, data: Step, total: Callable[[], int]) -> list[Tensor]:
        losses: list[Tensor] = []
        strategy, last = self.strategy, len(data.weights) - 1
        for batch, weight in data:
            final = len(losses) == last
            if strategy.syncing != final:
                strategy.sync_gradients(final)
            loss = self.loss.compute(strategy.model, batch)
            if not weight:
                loss = zero_loss(strategy.parameters, self.unused)
            losses.append(loss if final else loss.detach())  # one graph stays: the next forward pass reuses its leaves
            self.scaler.scale(weigh_loss(loss, weight * strategy.data_world, total())).backward()
            del batch, loss  # so that two batches are on the device, not three
        return losses


def weigh_loss(loss: Any, ours: int, total: int) -> Any:
    """Scale a mean over `ours / world` items, so that the mean over ranks is the mean over all `total` items."""
    if ours == total:
        return loss
    return loss / (total / ours) if ours else loss * 0.0


def zero_loss(parameters: list[nn.Parameter], unused: bool) -> Tensor:
    """Return 0.0, with a gradient of zero for each parameter: the loss of a micro-batch without items may be NaN."""
    if unused:
        raise DataError(
            "trainer.ddp.find_unused_parameters=true: a micro-batch has weight 0, and DDP would wait for its "
            "parameters; set trainer.ddp.find_unused_parameters=false, or give every micro-batch a weight"
        )
    return torch.stack([p.sum().float() for p in parameters]).sum() * 0.0
