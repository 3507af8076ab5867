"""Exponential moving average of the weights, used for validation and export (Polyak and Juditsky 1992)."""

from typing import Any

from trainer.annotated import Beta
from trainer.callback import Callback, Role, TrainerProtocol
from trainer.parallel.averaged_model import AveragedModel


class EMA(Callback):
    """Averages the weights: after each step, average = decay * average + (1 - decay) * weights. Buffers are copied.

    Memory: one copy of the model on its device. If a callback defers steps, the average follows as soon as the weights
    are there, so its numbers are the same.

    Args:
        decay: Weight of the past per step; the average spans about 1 / (1 - decay) steps.
    """

    role = Role.AVERAGE
    conflicts = {
        "bf16_weights": "the average is in the weights' bf16, whose last place is above most of its changes; use "
        "trainer.master_weights=true"
    }

    def __init__(self, decay: Beta = 0.999) -> None:
        self.decay = decay
        self.restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer) -> None:
        self.averaged = AveragedModel(trainer.strategy, trainer.module)
        self.model = trainer.eval_model = self.averaged.module
        if self.restored is not None:
            self.model.load_state_dict(self.restored)
        self.step = trainer.step - trainer.lag  # the last step whose weights are in the average

    def on_step_end(self, trainer) -> None:
        self._follow(trainer)

    def on_flush(self, trainer) -> None:
        self._follow(trainer)

    def _follow(self, trainer: TrainerProtocol) -> None:
        if trainer.step - trainer.lag == self.step:
            return
        self.step = trainer.step - trainer.lag
        self.averaged.update(1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state
