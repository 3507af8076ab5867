"""Measures the loss of a step over all ranks."""

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.comm.ranks import Ranks
from trainer.context import Gathered
from trainer.errors import NumericsError
from trainer.log import log


class TrainLoss:
    """The mean loss of a logged step over all ranks' items.

    Args:
        guarded: Whether a callback handles a loss that is not finite.

    Attributes:
        finite_at: The last logged step with a finite loss; None before the first one.
        since: The first logged step of the current streak of non-finite losses; None if the last loss was finite.
        streak: The length of this streak, in logged steps.
    """

    def __init__(self, ranks: Ranks, guarded: bool = False) -> None:
        self.ranks, self.guarded = ranks, guarded
        self.finite_at: int | None = None
        self.since: int | None = None
        self.streak = 0

    def measure(
        self, losses: Sequence[Tensor], weights: Sequence[int], step: int, gathered: Sequence[Gathered] = ()
    ) -> dict[str, float]:
        """Return the mean over the items of all ranks as `train/loss` (NaN without items), and the `gathered` metrics.

        Waits for the device; a collective.

        Args:
            losses: Mean loss of each of this rank's micro-batches, scalars.
            weights: The items of each micro-batch.
            gathered: Further values of this rank in the same exchange, read once the device has the losses.
        """
        own = sum(loss.item() * weight for loss, weight in zip(losses, weights, strict=True))
        values = [own, sum(weights), *(take() for take, _ in gathered)]
        sums, items, *others = zip(*self.ranks.gather(values), strict=True)
        loss = sum(sums) / total if (total := sum(items)) else math.nan
        if total:
            self._note(step, loss)
        metrics = {"train/loss": loss}
        for (_, combine), of_ranks in zip(gathered, others, strict=True):
            metrics |= combine(list(of_ranks))
        return metrics

    def _note(self, step: int, loss: float) -> None:
        if math.isfinite(loss):
            self.finite_at, self.since, self.streak = step, None, 0
            return
        if self.since is None:
            self.since = step
            log.warning("step %d: the loss is %s", step, loss)
        self.streak += 1

    @property
    def spoils(self) -> bool:
        """Whether the last loss was not finite, so that no checkpoint may replace an earlier one."""
        return self.since is not None and not self.guarded

    @property
    def ends(self) -> bool:
        """Whether two losses in a row were not finite, so that further steps are useless."""
        return self.streak > 1 and not self.guarded

    @property
    def lost(self) -> bool:
        """Whether a run that ends now has no finite loss; a guarded run may end with a step that was skipped."""
        return self.spoils or self.streak > 1 or (self.since is not None and self.finite_at is None)

    def refusal(self, step: int, checkpoint: str) -> NumericsError:
        fix = "lower optimizer.lr, or check the data or the loss"
        if self.finite_at is None:
            return NumericsError(f"train/loss was finite at no logged step up to step {step}; {fix}")
        back = f"; trainer.resume={checkpoint} restarts from the last finite checkpoint" if checkpoint else ""
        return NumericsError(f"train/loss is not finite since step {self.since or step}; {fix}{back}")
