"""Measures the loss of a step over all ranks."""

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.comm.ranks import Ranks
from trainer.errors import NumericsError
from trainer.log import log


class TrainLoss:
    """The mean loss of a step over all ranks' items, at the steps that are logged.

    Attributes:
        finite: Whether one was a finite number; None if none was measured.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.last = 0.0
        self.finite: bool | None = None

    def measure(self, losses: Sequence[Tensor], weights: Sequence[int], total: int, step: int) -> float:
        """Return the mean over the `total` items of all ranks; NaN without any. Waits for the device; a collective.

        Args:
            losses: Means over the items of this rank's micro-batches, scalars.
            weights: The items of each.
        """
        own = sum(loss.item() * weight for loss, weight in zip(losses, weights, strict=True))
        loss = sum(self.ranks.gather(own)) / total if total else math.nan
        if total:
            if math.isfinite(self.last) and not math.isfinite(loss):
                log.warning("step %d: the loss is %s; training goes on, but to nowhere", step, loss)
            self.finite = bool(self.finite) or math.isfinite(loss)
        self.last = loss
        return loss

    def refuse_never_finite(self, step: int) -> None:
        """Raise NumericsError if no loss was finite: such a run is no success."""
        if self.finite is False:
            raise NumericsError(
                f"train/loss was finite at no logged step up to step {step}; lower optimizer.lr, or mend the data or "
                "the loss"
            )
