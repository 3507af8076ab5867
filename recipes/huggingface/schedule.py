"""The learning rates of transformers' schedules, by its own functions, and its number of steps of an epoch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import torch

from trainer.errors import ConfigError, require
from trainer.optim.schedule import Rate, Schedule
from trainer.optim.torch_schedule import TorchRate

ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")  # need no number of steps
BY_METRIC = {"reduce_lr_on_plateau": "each evaluation", "greedy": "the training loss"}


@dataclass(frozen=True)
class TransformersSchedule(Schedule):
    """A schedule of transformers, as `TrainingArguments` names it.

    Args:
        lr_scheduler_type: Such as `linear`, `cosine` or `constant_with_warmup`.
        lr_scheduler_kwargs: Its own arguments.
        warmup_steps: Steps; below 1 a share of the run.
        epochs: `num_train_epochs` (null: `max_steps` ends the run), `micro_batch`, `accumulate` and
            `dataloader_drop_last` of a file whose steps must be transformers'; None: any steps.
    """

    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    warmup_steps: float = 0
    epochs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        require("recipe.warmup_steps", self.warmup_steps, at_least=0)
        if self.lr_scheduler_type in BY_METRIC:
            raise ConfigError(
                f"recipe.lr_scheduler_type={self.lr_scheduler_type}: follows {BY_METRIC[self.lr_scheduler_type]}, and "
                "Echelon's rates depend on the step alone; give another, such as linear or cosine"
            )

    def resolve(self, total: int | None, batch: int, epoch_samples: int | None) -> Rate:
        from transformers.optimization import get_scheduler

        if self.epochs and epoch_samples:
            refuse_other_steps(self.epochs, total, batch, epoch_samples)
        key = f"recipe.lr_scheduler_type={self.lr_scheduler_type}"
        if total is None and self.lr_scheduler_type not in ENDLESS:
            raise ConfigError(f"{key}: must know the end of the run; give trainer.max_steps or trainer.max_epochs")
        share = self.warmup_steps < 1
        warmup = math.ceil((total or 0) * self.warmup_steps) if share else int(self.warmup_steps)

        def make(lr: float) -> TorchRate:
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
            try:
                made = get_scheduler(self.lr_scheduler_type, optimizer, warmup, total, self.lr_scheduler_kwargs)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{key}: {' '.join(str(error).split())}") from None
            return TorchRate(optimizer, lambda done: (made.step,))

        make(1.0)  # mistakes that no learning rate decides are known here
        return RateOfPeaks(make)


class RateOfPeaks(Rate):
    """A rate for each peak: the floors of some schedules are rates, and no shares of the peak.

    Args:
        make: Returns the rate of an optimizer with this learning rate.
    """

    def __init__(self, make: Callable[[float], TorchRate]) -> None:
        self.of = cache(make)

    def __call__(self, step: int) -> float:
        """Return the factor on a learning rate of 1."""
        return self.of(1.0)(step)

    def put(self, step: int, groups: Sequence[dict[str, Any]], peaks: Sequence[float]) -> None:
        for group, peak in zip(groups, peaks):
            group["lr"] = peak * self.of(peak)(step) if peak else 0.0


def refuse_other_steps(given: dict[str, Any], total: int | None, batch: int, samples: int) -> None:
    """Refuse a file of TrainingArguments with which transformers makes another number of steps than Echelon.

    transformers ends a step at the end of an epoch, short of micro-batches or of samples. Echelon's steps continue into
    the next epoch.

    Raises:
        ConfigError: The numbers differ, or transformers drops samples that Echelon trains on.
    """
    micro, accumulate, drops = given["micro_batch"], given["accumulate"], given["dataloader_drop_last"]
    count = math.floor if drops else math.ceil
    of_epoch = max(1, math.ceil(count(Fraction(samples, batch // accumulate)) / accumulate))
    epochs, fix = given["num_train_epochs"], f"a batch that divides the epoch's {samples} samples"
    shown = f"per_device_train_batch_size={micro}, gradient_accumulation_steps={accumulate}"
    if drops and samples % (batch // accumulate) and (total is None or total * batch > samples):
        raise ConfigError(
            f"recipe.args: dataloader_drop_last=true: transformers makes {of_epoch} steps of an epoch, and drops "
            f"samples; Echelon trains on all {samples}, {samples / batch:g} steps ({shown}); give {fix}, or remove it"
        )
    if epochs is None:
        return
    theirs = math.ceil(Fraction(str(epochs)) * of_epoch)
    ours = math.ceil(Fraction(str(epochs)) * samples / batch)
    if theirs != ours:
        raise ConfigError(
            f"recipe.args: num_train_epochs={epochs:g}: transformers makes {theirs} steps, {of_epoch} of an epoch with "
            f"a short last one, and Echelon {ours} full ones ({shown}); give max_steps={theirs}, or {fix}"
        )
