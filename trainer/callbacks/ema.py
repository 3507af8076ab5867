"""Exponential moving average of the weights, for validation and export (Polyak and Juditsky 1992)."""

import math
from typing import Any

from trainer.annotated import Beta
from trainer.callback import Callback, Role
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.log import log
from trainer.parallel.averaged_model import AveragedModel

SPANS = 10  # length of a run, in spans of the average, after which exp(-10) of the initial weights is left


class EMA(Callback):
    """Averages the weights: after each step, average = decay * average + (1 - decay) * weights. Buffers are copied.

    If a callback defers steps, the average is updated once the weights are there, so its numbers are the same.
    """

    role = Role.AVERAGE
    conflicts = {
        "bf16_weights": "the average would be stored in bf16, which is too coarse for most of its changes; use "
        "trainer.master_weights=true"
    }

    def __init__(self, decay: Beta = 0.999) -> None:
        self.decay = decay
        self.restored: dict[str, Any] | None = None

    def cost(self) -> Cost:
        return Cost(copies=1, left_out="its pass over the weights is not modelled")

    def on_fit_start(self, trainer) -> None:
        self.averaged = AveragedModel(trainer.strategy, trainer.module)
        self.model = trainer.eval_model = self.averaged.module
        if self.restored is not None:
            self.model.load_state_dict(self.restored)
        self._warn(trainer.plan.max_steps)
        self.step = trainer.step - trainer.lag  # the last step whose weights are in the average

    def _warn(self, steps: int | None) -> None:
        """Warn if the average spans too much of a short run to forget the initial weights."""
        span = 1 / (1 - self.decay)
        if steps and span > max(1, steps / SPANS):
            log.warning(
                "callbacks.ema.decay=%g: averages over about %.0f steps, and the run has %d, so validation sees "
                "weights of its beginning; give callbacks.ema.decay=%g",
                self.decay, span, steps, max(0, math.floor(1000 * (1 - SPANS / steps))) / 1000,
            )  # fmt: skip

    def on_step_end(self, trainer) -> None:
        self._follow(trainer)

    def on_flush(self, trainer) -> None:
        self._follow(trainer)

    def _follow(self, trainer: Context) -> None:
        if trainer.step - trainer.lag == self.step:
            return
        self.step = trainer.step - trainer.lag
        self.averaged.update(1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state
