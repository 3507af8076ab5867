"""Agrees over the ranks, once per step, on requests to stop, save and validate, and on the step's total weight."""

import time
from collections.abc import Callable
from functools import partial

from trainer.comm.ranks import Ranks
from trainer.data.batch import Step
from trainer.plan import Plan
from trainer.process.signals import StopSignals
from trainer.state import TrainingState


class StepAgreement:
    """Sums a few integers over the ranks: one int64 all-reduce per step, which overlaps with the first forward pass.

    Rank 0's clock alone decides whether a checkpoint or a validation is due.

    Args:
        data_world: Number of replicas, which read different samples.

    Attributes:
        bad: Samples of the step that could not be read.
        requests: Numbers of ranks that request a stop, a checkpoint and a validation.
        weight: Items in the step. Items that several ranks read count once.
        sums: Waits for the sums of the current step; None once they are known.
        signals: The stop signals that this rank has received. Set by `Loop.fit`.
    """

    signals: StopSignals

    def __init__(self, ranks: Ranks, state: TrainingState, plan: Plan, data_world: int) -> None:
        self.ranks, self.state, self.plan, self.data_world = ranks, state, plan, data_world
        self.bad, self.requests, self.weight = 0, [0, 0, 0], 0
        self.sums: Callable[[], tuple[int, ...]] | None = None

    def begin(self, data: Step) -> Callable[[], int]:
        """Start summing the ranks' requests; return a function that waits for the total weight. A collective.

        Args:
            data: This rank's samples.
        """
        now, state, plan = time.monotonic(), self.state, self.plan
        bad, stops, weight = len(data.bad), bool(self.signals.name), sum(data.weights)
        due = (now - state.saved_at >= plan.save_s, now - state.validated_at >= plan.validate_s)
        if self.ranks.world == 1:
            self.bad, self.requests, self.weight = bad, [stops, *due], weight
            return partial(int, weight)
        self.sums = self.ranks.agree((bad, stops, *((0, 0) if self.ranks.rank else due), weight))
        return self.wait

    def wait(self) -> int:
        """Wait for the sums if they are pending; return the total weight over all ranks."""
        if self.sums is not None:
            self.bad, *self.requests, weight = self.sums()
            self.weight = weight * self.data_world // self.ranks.world
            self.sums = None
        return self.weight
