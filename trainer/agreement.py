"""The requests of all ranks to stop, save and validate after a step, and the weight of its items."""

import time
from collections.abc import Callable
from functools import partial

from trainer.comm.ranks import Ranks
from trainer.data.batch import Step
from trainer.plan import Plan
from trainer.process.signals import StopSignals
from trainer.state import TrainingState


class StepAgreement:
    """Sums a few integers over the ranks: one int64 all-reduce a step, alongside the first forward pass.

    Whether a checkpoint or a validation is due is decided by rank 0's clock alone.

    Args:
        data_world: Replicas: ranks that read different samples.

    Attributes:
        bad: Samples of the step that could not be read.
        requests: Ranks that ask to stop, to save and to validate.
        weight: Items of the step. The items of ranks that read the same samples count once.
        sums: Waits for the sums of the step that has begun; None once they are known.
        signals: The signals to stop that this rank has received. `Loop.fit` sets it.
    """

    signals: StopSignals

    def __init__(self, ranks: Ranks, state: TrainingState, plan: Plan, data_world: int) -> None:
        self.ranks, self.state, self.plan, self.data_world = ranks, state, plan, data_world
        self.bad, self.requests, self.weight = 0, [0, 0, 0], 0
        self.sums: Callable[[], tuple[int, ...]] | None = None

    def begin(self, data: Step) -> Callable[[], int]:
        """Begin to sum what this rank asks for. Return what waits for the weight of all ranks' items. A collective.

        Args:
            data: The samples of this rank.
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
        """Wait for the sums, once per step; return the weight of all ranks' items."""
        if self.sums is not None:
            self.bad, *self.requests, weight = self.sums()
            self.weight = weight * self.data_world // self.ranks.world
            self.sums = None
        return self.weight
