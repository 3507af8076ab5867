"""Measures the loss of a step over all ranks."""

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.callback import Gathered
from trainer.comm.ranks import Ranks
from trainer.errors import NumericsError
from trainer.log import log


class TrainLoss:
    """The mean loss of a step over all ranks' items, at the steps that are logged.

    Attributes:
        finite: Whether a measured loss was finite; None before the first measurement.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.last = 0.0
        self.finite: bool | None = None

    def measure(
        self, losses: Sequence[Tensor], weights: Sequence[int], step: int, gathered: Sequence[Gathered] = ()
    ) -> dict[str, float]:
        """Return the mean over the items of all ranks, NaN without any, as `train/loss`, with the `gathered` metrics.

        Waits for the device; a collective.

        Args:
            losses: Means over the items of this rank's micro-batches, scalars.
            weights: The items of each micro-batch.
            gathered: Further values of this rank, which need no exchange of their own. They are taken once the device
                has the losses.
        """
        own = sum(loss.item() * weight for loss, weight in zip(losses, weights, strict=True))
        values = [own, sum(weights), *(take() for take, _ in gathered)]
        sums, items, *others = zip(*self.ranks.gather(values), strict=True)
        loss = sum(sums) / total if (total := sum(items)) else math.nan
        if total:
            if math.isfinite(self.last) and not math.isfinite(loss):
                log.warning("step %d: the loss is %s; training goes on, but learns nothing more", step, loss)
            self.finite = bool(self.finite) or math.isfinite(loss)
        self.last = loss
        metrics = {"train/loss": loss}
        for (_, combine), of_ranks in zip(gathered, others, strict=True):
            metrics |= combine(list(of_ranks))
        return metrics

    def refuse_never_finite(self, step: int) -> None:
        """Raise NumericsError if no loss was finite: such a run is no success."""
        if self.finite is False:
            raise NumericsError(
                f"train/loss was finite at no logged step up to step {step}; lower optimizer.lr, or check the data or "
                "the loss"
            )
