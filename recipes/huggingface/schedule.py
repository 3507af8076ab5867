"""The learning rates of transformers' schedules, by its own functions."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.errors import ConfigError, require
from trainer.optim.schedule import Rate, Schedule
from trainer.optim.torch_schedule import TorchRate

ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")  # need no number of steps


@dataclass(frozen=True)
class TransformersSchedule(Schedule):
    """A schedule of transformers, as `TrainingArguments` names it.

    Args:
        lr_scheduler_type: Such as `linear`, `cosine` or `constant_with_warmup`.
        lr_scheduler_kwargs: Its own arguments.
        warmup_steps: Steps; below 1 a share of the run.
    """

    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    warmup_steps: float = 0

    def __post_init__(self) -> None:
        require("recipe.warmup_steps", self.warmup_steps, at_least=0)

    def resolve(self, total: int | None, batch: int, epoch_samples: int | None) -> Rate:
        from transformers.optimization import get_scheduler

        key = f"recipe.lr_scheduler_type={self.lr_scheduler_type}"
        if total is None and self.lr_scheduler_type not in ENDLESS:
            raise ConfigError(f"{key}: must know the end of the run; give trainer.max_steps or trainer.max_epochs")
        share = self.warmup_steps < 1
        warmup = math.ceil((total or 0) * self.warmup_steps) if share else int(self.warmup_steps)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        try:
            made = get_scheduler(self.lr_scheduler_type, optimizer, warmup, total, self.lr_scheduler_kwargs)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key}: {' '.join(str(error).split())}") from None
        return TorchRate(optimizer, lambda done: (made.step,))
