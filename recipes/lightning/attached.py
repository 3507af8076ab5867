"""The part of Lightning's Trainer that a LightningModule may read, and the collection of what it logs."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.lightning.honoured import TRAINER
from recipes.lightning.strategy import AttachedStrategy, NoSuchAttribute
from trainer.checks.recipe import describe
from trainer.context import Context
from trainer.errors import ConfigError

OF_TRAINING = ("train_", "train/", "training_")
OWN = ("datamodule", "lightning_module", "configured", "echelon", "training", "validating", "predicting", "batch_size")
OWN += (
    "logged",
    "in_training_step",
    "of_epoch",
    "should_stop",
    "last_batch",
    "after_batch",
    "composed",
)  # attributes of the view that are set
KEY = "self.trainer.callback_metrics"
OF_VALIDATION = ("val_", "val/", "valid_", "valid/", "validation_", "validation/")


class Logged:
    """Sums of the values that a module logs by name, with their weights."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Any]] = {}
        self.metrics: dict[str, Any] = {}  # objects of torchmetrics, by name
        self.names: dict[str, str] = {}  # the module's, by Echelon's

    def add(self, name: str, value: Any, weight: int, key: str = "self.log({!r})") -> None:
        """Add a number, a tensor of one number, a metric of torchmetrics, or a dict of these.

        Args:
            key: What gave the value, with a place for its name; for errors.

        Raises:
            ConfigError: The value is none of these, or another name of the module is the same here.
        """
        if isinstance(value, Mapping):
            for inner, each in value.items():
                self.add(inner, each, weight, key)
            return
        short = short_name(name)
        if (other := self.names.setdefault(short, name)) != name:
            raise ConfigError(
                f"{key.format(name)}: is {short!r} here, as {other!r} is, and both would be one mean; rename one"
            )
        if hasattr(value, "compute") and hasattr(value, "update"):
            self.metrics[short] = value
            value = getattr(value, "_forward_cache", None)
            value = torch.zeros(()) if value is None else value
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise ConfigError(
                f"{key.format(name)}: got {describe(value)}; log a number, a tensor of one number, or a metric"
            )
        both = self.sums.setdefault(short, [0.0, 0])
        value = value.detach().reshape(()).double() if isinstance(value, Tensor) else value
        both[0] += value * weight
        both[1] += weight

    def numbers(self) -> dict[str, list[float]]:
        """Return name -> sum and weight, as plain numbers."""
        return {name: [float(total), weight] for name, (total, weight) in self.sums.items()}

    def computed(self) -> dict[str, list[float]]:
        """Return the same with the values of metrics over all ranks, and reset these. A collective, if there is one."""
        values = {name: [float(metric.compute()), 1] for name, metric in self.metrics.items()}
        for metric in self.metrics.values():
            metric.reset()
        return self.numbers() | values

    def clear(self) -> None:
        self.sums, self.metrics, self.names = {}, {}, {}


def short_name(name: str) -> str:
    """Return a name without the split, which Echelon puts before each: `val_loss` is `loss` of `val/loss`."""
    prefixes = (*OF_TRAINING, *OF_VALIDATION)
    return next((name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)), name)


class StepMetrics(dict[str, Tensor]):
    """The numbers of a step by Echelon's names. Look-ups and `in` take the module's names, too.

    Raises:
        ConfigError: A name is of the validation; or a number is looked up, is not there, and there is no default.
    """

    def __missing__(self, name: str) -> Tensor:
        if (found := self._find(name)) is not None:
            return self[found]
        known = f"has {', '.join(self)}" if self else "is not logged; give trainer.log_every_steps=1"
        raise ConfigError(f"{KEY}[{name!r}]: is not there, since this step {known}")

    def __contains__(self, name: object) -> bool:
        return self._find(str(name)) is not None

    def get(self, name: str, default: Any = None) -> Any:
        found = self._find(name)
        return default if found is None else self[found]

    def _find(self, name: str) -> str | None:
        """Return Echelon's name of a number; None if the number is not there."""
        if super().__contains__(name):
            return name
        if name.startswith(OF_VALIDATION):
            raise ConfigError(
                f"{KEY}[{name!r}]: has numbers of training alone; keep those of validation_step in the module"
            )
        found = f"train/{short_name(name)}"
        return found if super().__contains__(found) else None


class Read:
    """A scheduler to read: what its `step` would change is lost, since a resume steps schedulers from the start."""

    def __init__(self, scheduler: Any) -> None:
        vars(self)["scheduler"] = scheduler

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] for `isinstance`
        return type(vars(self)["scheduler"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["scheduler"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("self.lr_schedulers().step(): Echelon steps the schedulers; leave it out")


class AttachedTrainer:
    """The object that a module finds as `self.trainer`. It reads Echelon's trainer once that is attached."""

    barebones = sanity_checking = testing = fast_dev_run = interrupted = received_sigterm = False
    logger = progress_bar_callback = checkpoint_callback = early_stopping_callback = min_steps = None
    min_epochs = 0
    loggers: list[Any] = []
    callbacks: list[Any] = []
    checkpoint_callbacks: list[Any] = []
    early_stopping_callbacks: list[Any] = []

    def __init__(self) -> None:
        vars(self).update(datamodule=None, lightning_module=None, configured=None, strategy=AttachedStrategy(self))
        self.echelon: Context | None = None
        self.training, self.validating, self.predicting, self.batch_size = True, False, False, 1
        self.last_batch, self.after_batch, self.composed = False, False, False
        self.logged, self.in_training_step = Logged(), False
        self.of_epoch: dict[str, bool] = {}  # names with on_epoch in training_step, and whether each step has them, too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = TRAINER.refused.get(name)
        known = f"leave it out, or use one of {', '.join(sorted(TRAINER.given))}"
        raise NoSuchAttribute(f"self.trainer.{name}: {reason or f'Echelon has no such attribute; {known}'}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OWN:
            raise ConfigError(
                f"self.trainer.{name}={value!r}: Echelon does not follow it; change the config, or to end the run set "
                "self.trainer.should_stop"
            )
        super().__setattr__(name, value)

    @contextmanager
    def predicts(self) -> Iterator[Logged]:
        """Be a trainer that predicts. Yield what is logged meanwhile."""
        before = self.training, self.predicting, self.logged
        self.training, self.predicting, self.logged = False, True, Logged()
        try:
            yield self.logged
        finally:
            self.training, self.predicting, self.logged = before

    @property
    def run(self) -> Context:
        """Echelon's trainer.

        Raises:
            ConfigError: It lacks the callback that attaches it, as `echelon evaluate` and `echelon predict` do.
        """
        if self.echelon is None:
            raise ConfigError(
                "callbacks: self.trainer of a LightningModule needs a run with recipes.lightning.LightningHooks; give "
                "callbacks={'lightning': LightningHooks()}, and keep self.trainer out of what evaluate and predict call"
            )
        return self.echelon

    @property
    def max_steps(self) -> int:
        """The limit in steps that is set; -1 if an epoch ends the run, as in Lightning."""
        return -1 if self.run.options.max_steps is None else self.run.options.max_steps

    @property
    def estimated_stepping_batches(self) -> float:
        return math.inf if self.run.plan.max_steps is None else self.run.plan.max_steps

    @property
    def max_epochs(self) -> int | None:
        most = self.run.options.max_epochs
        if most is not None or self.run.plan.max_steps is None:
            return None if most is None else math.ceil(most)
        return math.ceil(self.run.plan.samples_at(self.run.plan.max_steps) / (self.run.plan.epoch_samples or math.inf))

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which each sample is taken once; a fraction, if Echelon cuts the batches."""
        samples = self.run.plan.epoch_samples
        return math.inf if samples is None else samples / self.run.batch

    def epochs_at(self, step: int) -> int:
        """Return the whole epochs in so many steps."""
        samples = self.run.plan.epoch_samples
        return 0 if samples is None else self.run.plan.samples_at(step) // samples

    def steps_in(self, epochs: int) -> int:
        """Return the first number of steps that has so many whole epochs."""
        return (0 if epochs == 0 else math.ceil(epochs * self.steps_per_epoch)) - self.run.plan.ahead

    @property
    def num_training_batches(self) -> float:
        return self.steps_per_epoch * self.accumulate_grad_batches

    @property
    def accumulate_grad_batches(self) -> int:
        return self.run.plan.accumulate

    @property
    def gradient_clip_val(self) -> float | None:
        options = self.run.options
        return options.clip_value if options.clip_norm is None else options.clip_norm

    @property
    def current_epoch(self) -> int:
        """The epoch of the step; after its last batch, and in a validation, the epoch that this batch belongs to."""
        step = self.global_step - (self.validating or self.after_batch)
        return self.epochs_at(step) if step > 0 else 0

    @property
    def global_step(self) -> int:
        return self.echelon.step if self.echelon else 0  # Lightning's `validate` gives 0, too

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        return self.run.ranks.place.local_rank

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    num_devices = world_size

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def default_root_dir(self) -> str:
        return str(self.run.run_dir)

    log_dir = default_root_dir

    @property
    def model(self) -> Any:
        """The module; once it is laid out over ranks, what wraps it."""
        strategy = getattr(self.echelon, "strategy", None)
        return self.lightning_module if strategy is None else strategy.model

    @property
    def gradient_clip_algorithm(self) -> str | None:
        options = self.run.options
        return "value" if options.clip_value is not None else None  # None: by the norm, as in Lightning

    @property
    def log_every_n_steps(self) -> int:
        return self.run.options.log_every_steps

    @property
    def enable_validation(self) -> bool:
        return getattr(self.run.plan, "validation", None) is not None

    @property
    def evaluating(self) -> bool:
        return self.validating

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch is the last one of its epoch."""
        return self.last_batch

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.run.ranks.place.local_world

    @property
    def node_rank(self) -> int:
        return self.global_rank // self.run.ranks.place.local_world

    @property
    def device_ids(self) -> list[int]:
        return list(range(self.run.ranks.place.local_world))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers with their settings; `step` of one is refused, since Echelon steps them."""
        if self.configured is None:
            return []
        self.configured.rate(self.global_step)
        return [replace(each, scheduler=Read(each.scheduler)) for each in self.configured.schedulers]

    @property
    def optimizers(self) -> list[Any]:
        return [self.run.optimizer]

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        return StepMetrics((name, torch.tensor(value)) for name, value in self.run.metrics.items())

    logged_metrics = callback_metrics

    @property
    def should_stop(self) -> bool:
        return bool(self.run.stop_reason)

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            self.run.stop("the module set self.trainer.should_stop")
