"""The forward and backward passes of a step, micro-batch by micro-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from trainer.checks.recipe import MISSING, CheckedLoss
from trainer.comm.phases import Phase, ends_with_wait
from trainer.data.batch import Step
from trainer.parallel.strategy import Strategy
from trainer.parallel.torch_calls import backward

# (a step's data, a function that waits for the total weight) -> the losses of the micro-batches. Afterwards the
# parameters have the gradients, reduced over the ranks.
ForwardBackward = Callable[[Step, Callable[[], int]], list[Tensor]]


class Accumulate:
    """Runs the passes of one micro-batch after another. The last one reduces the accumulated gradients.

    `loss` is under autocast if the precision uses it. `mark` starts a phase of the clock; None if no clock runs.
    """

    mark: Callable[[Phase], None] | None = None

    def __init__(self, loss: CheckedLoss, strategy: Strategy, scaler: GradScaler) -> None:
        self.loss, self.strategy = loss, strategy
        self.scale = scaler.scale if scaler.is_enabled() else None

    def __call__(self, data: Step, total: Callable[[], int]) -> list[Tensor]:
        losses: list[Tensor] = []
        strategy, mark, last = self.strategy, self.mark, len(data.weights) - 1 if data.reduces else -1
        for batch, weight in data:
            if mark:
                mark(Phase.FORWARD)
            final = len(losses) == last
            if strategy.syncing != final:
                strategy.sync_gradients(final)
            loss: Any = MISSING
            try:
                if weight:
                    loss = self.loss.compute(strategy.model, batch)
                else:
                    loss = strategy.zero_loss(partial(self.loss.compute, strategy.model, batch))
                losses.append(loss if final else loss.detach())  # keep one graph, whose leaves the next pass reuses
                ours, weighed = weight * strategy.data_world, total()
                scaled = loss if ours == weighed else weigh_loss(loss, ours, weighed)
                if self.scale:
                    scaled = self.scale(scaled)
                if mark:
                    mark(Phase.BACKWARD)
                    if final and strategy.data_world > 1:
                        ends_with_wait(scaled)
                backward(scaled)
            except Exception as error:
                shown: Any = self.loss.explain(error, loss, strategy.model) or error
                shown.refs = data.current()  # for the error message
                if shown is error:
                    raise
                raise shown from error
            del batch, loss, scaled  # so that the device holds two batches, not three
        return losses


def weigh_loss(loss: Any, ours: int, total: int) -> Any:
    """Scale a mean over `ours / world` items, so that the mean over ranks is the mean over all `total` items."""
    if ours == total:
        return loss
    return loss / (total / ours) if ours else loss * 0.0
