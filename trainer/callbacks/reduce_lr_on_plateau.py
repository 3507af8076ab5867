"""Lowers the learning rates when a validation metric no longer improves."""

import math
from typing import Annotated, Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau as Scheduler

from trainer.annotated import Below, NonNegativeFloat, NonNegativeInt, PositiveFloat
from trainer.callback import Callback
from trainer.checks.callback import check_watched
from trainer.errors import ConfigError
from trainer.log import log

LATE = 1 << 62  # a step after every warm-up


class ReduceLROnPlateau(Callback):
    """Multiplies each group's rate by `factor` after more than `patience` validations in a row without improvement.

    torch's scheduler of this name decides, on an optimizer that has only the rates. Metrics agree on all ranks, so all
    change their rates at the same step. The schedule has to be constant after its warm-up; during the warm-up
    validations don't count.

    Args:
        min_delta: A change up to this does not count as improvement, in the metric's unit.
        cooldown: Validations after a reduction that don't count.
        min_lr: No rate is lowered below this.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        factor: Annotated[PositiveFloat, Below(1)] = 0.1,
        patience: NonNegativeInt = 3,
        min_delta: NonNegativeFloat = 0.0,
        cooldown: NonNegativeInt = 0,
        min_lr: NonNegativeFloat = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self.metric, self.factor, self.patience, self.min_delta = metric, factor, patience, min_delta
        self.cooldown, self.min_lr, self.mode = cooldown, min_lr, mode
        self.rates = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.scheduler = Scheduler(
            self.rates, mode, factor, patience, min_delta, "abs", cooldown, min_lr=0.0, eps=0.0
        )  # fmt: skip

    def on_fit_start(self, trainer) -> None:
        check_watched("reduce_lr_on_plateau", trainer.plan, self.metric, self.mode)
        if not trainer.plan.rate.is_constant(LATE):
            raise ConfigError(
                "callbacks.reduce_lr_on_plateau: the schedule changes the rates at each step; set schedule=constant, "
                "or leave reduce_lr_on_plateau out"
            )

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        if not trainer.plan.rate.is_constant(trainer.step + trainer.plan.ahead):
            return  # in the warm-up
        (stand_in,) = self.rates.param_groups
        stand_in["lr"] = 1.0
        self.scheduler.step(metrics.get(self.metric, math.nan))  # absent: its count was 0
        if stand_in["lr"] == 1.0:
            return
        before = [group["lr"] for group in trainer.optimizer.param_groups]
        for group in trainer.optimizer.param_groups:
            group["lr"] = min(group["lr"], max(self.min_lr, group["lr"] * self.factor))
        if before == [group["lr"] for group in trainer.optimizer.param_groups]:
            return
        rates = ", ".join(f"{rate:.3g}" for rate in {group["lr"]: None for group in trainer.optimizer.param_groups})
        log.info(
            "reduce_lr_on_plateau: %s has not improved since its best, %.4g; lr %s from step %d on",
            self.metric, self.scheduler.best, rates, trainer.step + 1,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "best": scheduler.best,
            "num_bad_epochs": scheduler.num_bad_epochs,
            "cooldown_counter": scheduler.cooldown_counter,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.best = float(state["best"])
        self.scheduler.num_bad_epochs = int(state["num_bad_epochs"])
        self.scheduler.cooldown_counter = int(state["cooldown_counter"])
