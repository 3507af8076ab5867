"""Learning rates as pure functions of the step: a factor on each group's own rate, with a warm-up."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from trainer.annotated import AtMost, Below, PositiveFloat, PositiveInt, Share, check_fields, check_names
from trainer.config.duration import Duration
from trainer.errors import ConfigError
from trainer.log import log


@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rates: a linear warm-up, then `shape`, both scaled with the batch.

    Args:
        warmup: A duration in which the factor rises linearly to the first value of `shape`.
        lr_scaling: `linear` (Goyal et al. 2017, arXiv:1706.02677) or `sqrt` (You et al. 2020, arXiv:1904.00962) in
            global batch / reference_batch.
        reference_batch: Samples of the batch for which the optimizer's rate was chosen.
    """

    warmup: int | str = 0
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: PositiveInt = 256

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
        Duration.parse(self.warmup, "schedule.warmup")

    def shape(self, progress: float) -> float:
        """Return the factor at `progress` in [0, 1] of the steps after the warm-up."""
        raise NotImplementedError

    def resolve(self, total: int | None, batch: int, epoch_samples: int | None) -> "Rate":
        """Return the rate of a run with `total` steps (None: open-ended) of `batch` samples."""
        if type(self).shape is Schedule.shape:
            raise ConfigError(f"schedule={type(self).__name__}(): has no shape(progress); give Constant() or Cosine()")
        warmup = Duration.parse(self.warmup, "schedule.warmup").steps("schedule.warmup", batch, epoch_samples)
        if total is None and not isinstance(self, Constant):
            name = name_of(self)
            raise ConfigError(
                f"trainer.max_steps=null: schedule={name} must know the end of the run; "
                "give trainer.max_steps or trainer.max_epochs, or schedule=constant"
            )
        if total is not None and warmup > total:
            log.warning("schedule.warmup=%s: the run ends at step %d, before the rate has its peak", self.warmup, total)
        return ShapedRate(self, warmup, max(1, (total or 0) - warmup), self.factor_of_batch(batch))

    def factor_of_batch(self, batch: int) -> float:
        ratio = batch / self.reference_batch
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]


def name_of(schedule: Schedule) -> str:
    """Return a schedule's name in the config: one_cycle for OneCycle."""
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", type(schedule).__name__).lower()


class Rate:
    """The learning rates of a run, as functions of the step."""

    name = "recipe"  # of its schedule, as the config has it

    def __call__(self, step: int) -> float:
        """Return the factor on the optimizer's learning rates."""
        raise NotImplementedError

    def put(self, step: int, groups: Sequence[dict[str, Any]], peaks: Sequence[float]) -> None:
        """Set a step's learning rates in an optimizer's groups, whose initial rates were `peaks`."""
        factor = self(step)
        for group, peak in zip(groups, peaks):
            group["lr"] = peak * factor

    def is_constant(self, step: int) -> bool:
        """Return whether the rates no longer change from this step on, so that a rate set by user code is kept."""
        return False


@dataclass(frozen=True)
class ShapedRate(Rate):
    schedule: Schedule
    warmup: int  # steps
    rest: int  # steps after the warm-up
    scale: float

    @property
    def name(self) -> str:
        return name_of(self.schedule)

    def ending(self, total: int) -> "ShapedRate":
        """Return the rates of a run that ends at another step."""
        return replace(self, rest=max(1, total - self.warmup))

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.scale * self.schedule.shape(0.0) * (step + 1) / self.warmup
        return self.scale * self.schedule.shape(min(1.0, (step - self.warmup) / self.rest))

    def is_constant(self, step: int) -> bool:
        return isinstance(self.schedule, Constant) and (step > self.warmup or not self.warmup)


class OfRecipe:
    """Marks the recipe's own schedule."""


@check_names("schedule.")
@dataclass(frozen=True)
class Constant(Schedule):
    def shape(self, progress: float) -> float:
        return 1.0


@check_names("schedule.")
@dataclass(frozen=True)
class Linear(Schedule):
    """A linear decay to `floor`, a fraction of the peak."""

    floor: Share = 0.0

    def shape(self, progress: float) -> float:
        return self.floor + (1 - self.floor) * (1 - progress)


@check_names("schedule.")
@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine down to `floor` (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts)."""

    floor: Share = 0.0

    def shape(self, progress: float) -> float:
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


@check_names("schedule.")
@dataclass(frozen=True)
class OneCycle(Schedule):
    """A cosine up from `start` to 1 in the first fraction `rise` of the run, then down to `floor`.

    Paper: Smith and Topin 2018, arXiv:1708.07120. `start` and `floor` are fractions of the peak.
    """

    rise: Annotated[PositiveFloat, Below(1)] = 0.3
    start: Share = 0.04
    floor: Share = 4e-6

    def shape(self, progress: float) -> float:
        low, x = (
            (self.start, progress / self.rise)
            if progress < self.rise
            else (self.floor, (1 - progress) / (1 - self.rise))
        )
        return low + (1 - low) * 0.5 * (1 - math.cos(math.pi * x))


@check_names("schedule.")
@dataclass(frozen=True)
class Cyclic(Schedule):
    """`cycles` triangles between `floor` and 1 (Smith 2017, arXiv:1506.01186)."""

    cycles: PositiveInt = 4
    floor: Share = 0.1

    def shape(self, progress: float) -> float:
        x = progress * self.cycles % 1.0
        return self.floor + (1 - self.floor) * (1 - abs(2 * x - 1))


@check_names("schedule.")
@dataclass(frozen=True)
class SWA(Schedule):
    """1, then a linear decay to `floor`, which stays from the fraction `start` of the run on, for weight averaging.

    Paper: Izmailov et al. 2018, arXiv:1803.05407. The defaults are close to those of the authors' code.

    Args:
        start: Fraction of the run at which the decay ends.
        annealing: Fraction of the run that the decay takes.
        floor: A fraction of the peak.
    """

    start: Annotated[PositiveFloat, AtMost(1)] = 0.7
    annealing: PositiveFloat = 0.35
    floor: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.annealing > self.start:
            raise ConfigError(f"schedule.annealing={self.annealing}: must be at most schedule.start={self.start}")

    def shape(self, progress: float) -> float:
        left = (self.start - progress) / self.annealing
        return self.floor + (1 - self.floor) * min(1.0, max(0.0, left))
