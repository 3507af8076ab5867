"""Reads `configure_optimizers`: an optimizer of Echelon's parameter groups, and rates as functions of the step."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from recipes.lightning.attached import OF_TRAINING, AttachedTrainer, short_name
from trainer.checks.recipe import describe
from trainer.config.parameter_groups import OWN
from trainer.errors import ConfigError, nearest
from trainer.log import log
from trainer.optim.groups import Groups
from trainer.optim.schedule import Rate
from trainer.optim.torch_schedule import FOLLOWS, TorchRate, base_rate

KEY = "configure_optimizers()"
NOT_COPIED = ("params", "initial_lr")  # keys of a group


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of torch with Lightning's settings of it."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    reduce_on_plateau: bool | None = None
    strict: bool = True
    name: str | None = None

    @property
    def on_plateau(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)


class Configured:
    """The optimizer that a module has configured, which trains nothing: its groups and schedulers are read.

    Attributes:
        plateaus: Values that schedulers of role ReduceLROnPlateau have seen, by the steps done and by monitor.
    """

    def __init__(self, module: nn.Module, view: AttachedTrainer) -> None:
        configure: Any = module.configure_optimizers
        self.optimizer, schedulers = parse(configure())
        self.schedulers = [self._scheduler(each) for each in schedulers]
        refuse_no_rate(self.optimizer)
        self.view = view
        self.names = names_of(module, self.optimizer)
        self.plateaus: dict[int, dict[str, float]] = {}
        self.rate = TorchRate(self.optimizer, self.due)

    def _scheduler(self, given: Any) -> Scheduler:
        found = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
        known = [field.name for field in fields(Scheduler)]
        if unknown := [key for key in found if key not in known]:
            raise ConfigError(f"{KEY}: lr_scheduler has {unknown[0]!r}, which is no key of it; give {', '.join(known)}")
        made = Scheduler(**found)
        refuse_plateau_settings(made)
        if not hasattr(made.scheduler, "step") or made.interval not in ("step", "epoch"):
            raise ConfigError(f"{KEY}: {made.scheduler!r} with interval {made.interval!r} is no scheduler of torch's")
        if getattr(made.scheduler, "optimizer", self.optimizer) is not self.optimizer:
            raise ConfigError(f"{KEY}: a scheduler is of another optimizer than the one returned; return its own")
        if made.on_plateau and not made.monitor:
            raise ConfigError(f"{KEY}: ReduceLROnPlateau needs a metric; return monitor, such as 'val_loss', with it")
        if made.on_plateau and str(made.monitor).startswith(OF_TRAINING):
            raise ConfigError(
                f"{KEY}: monitor={made.monitor!r}: ReduceLROnPlateau follows the validation; log a metric in "
                "validation_step, and return its name"
            )
        return made

    def parameter_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return each group with all of its settings, and as frozen the parameters that are in none."""
        parameters = dict(module.named_parameters())
        groups = []
        for number, (group, names) in enumerate(zip(self.optimizer.param_groups, self.names, strict=True)):
            settings = {key: group[key] for key in group if key not in NOT_COPIED}
            settings |= {"lr": base_rate(group), FOLLOWS: number}
            groups += [{"params": [parameters[name] for name in names], "held": True, **settings}] if names else []
        in_groups = {name for names in self.names for name in names}
        rest = [name for name, p in parameters.items() if name not in in_groups and p.requires_grad]
        if rest:
            log.info("%s: has no group with %s, so %d parameters are frozen", KEY, ", ".join(rest[:3]), len(rest))
            groups.append({"params": [parameters[name] for name in rest], "freeze": True})
        return groups

    def make(self, groups: Groups) -> Optimizer:
        """Return an optimizer of the same class and attributes, of other groups and without a state."""
        kind, own = type(self.optimizer), vars(self.optimizer)
        made = kind.__new__(kind)
        left_out = ("state", "param_groups", "step", "_opt_called")  # a scheduler has put its own `step` there
        vars(made).update({key: value for key, value in own.items() if key not in left_out})
        made.state, made.param_groups = defaultdict(dict), []
        own_keys = {key for group in self.optimizer.param_groups for key in group if key not in NOT_COPIED}
        made.defaults = {**dict.fromkeys(own_keys), **self.optimizer.defaults, FOLLOWS: 0}
        for group in groups:
            made.add_param_group(dict(group))
        return made

    def due(self, done: int) -> Iterator[Callable[[], None]]:
        """Yield what steps the schedulers when so many steps are done, as Lightning's loop does."""
        view = self.view
        epoch = view.epochs_at(done - 1)
        within = done - view.steps_in(epoch)
        for each in (s for s in self.schedulers if s.interval == "step" and not s.on_plateau):
            period = each.frequency // math.gcd(each.frequency, view.accumulate_grad_batches)
            if within % period == 0:
                yield each.scheduler.step
        ended = view.epochs_at(done)
        for each in (s for s in self.schedulers if s.interval == "epoch" and not s.on_plateau):
            if ended > epoch and ended % each.frequency == 0:
                yield each.scheduler.step
        for each in (s for s in self.schedulers if s.on_plateau):
            if str(each.monitor) in self.plateaus.get(done, {}):
                yield partial(each.scheduler.step, self.plateaus[done][str(each.monitor)])

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics that schedulers wait for. Errors are those of `refuse_unknown`."""
        self.refuse_unknown(metrics)
        for monitor, name in self.monitors.items():
            self.plateaus.setdefault(step, {})[monitor] = metrics[name]

    def refuse_unknown(self, metrics: Collection[str]) -> None:
        """Raise ConfigError if a scheduler waits for a metric that is none of these."""
        for monitor, name in self.monitors.items():
            if name not in metrics:
                raise ConfigError(
                    f"{KEY}: monitor={monitor!r}: validation gives no such metric; {nearest(name, metrics)}"
                )

    @property
    def monitors(self) -> dict[str, str]:
        """Return the metric that each scheduler of role ReduceLROnPlateau waits for, as the module names it."""
        return {str(s.monitor): f"val/{short_name(str(s.monitor))}" for s in self.schedulers if s.on_plateau}


def refuse_plateau_settings(given: Scheduler) -> None:
    """Raise ConfigError if settings ask for other steps of a plateau's scheduler than one at each validation."""
    kind = type(given.scheduler).__name__
    if given.reduce_on_plateau is not None and given.reduce_on_plateau != given.on_plateau:
        asked = f"reduce_on_plateau={given.reduce_on_plateau} with {kind}"
        raise ConfigError(f"{KEY}: {asked}, and only ReduceLROnPlateau is stepped with a metric; leave it out")
    if not given.on_plateau:
        return
    if given.strict is False:
        raise ConfigError(f"{KEY}: strict=False, and {kind} needs its monitor at each validation; leave it out")
    if (given.interval, given.frequency) != ("epoch", 1):
        asked = f"interval={given.interval!r} and frequency={given.frequency} with {kind}"
        raise ConfigError(f"{KEY}: {asked}, which steps at each validation; give trainer.validate_every instead")


def parse(found: Any) -> tuple[Optimizer, list[Any]]:
    """Return the optimizer and its schedulers, from any of the forms that Lightning takes.

    Raises:
        ConfigError: There is no optimizer, or more than one.
    """
    schedulers: list[Any] = []
    if isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        optimizers, several = list(found[0]), found[1]
        schedulers = list(several) if isinstance(several, list | tuple) else [several]
    elif isinstance(found, list | tuple):
        optimizers = list(found)
    else:
        optimizers = [] if found is None else [found]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        config = optimizers[0]
        schedule = config.get("lr_scheduler")
        if schedule is not None and "monitor" in config:
            own = schedule if isinstance(schedule, Mapping) else {"scheduler": schedule}
            schedule = {"monitor": config["monitor"], **own}
        optimizers, schedulers = [config.get("optimizer")], [] if schedule is None else [schedule]
    if len(optimizers) > 1:
        several = f"returned {len(optimizers)} optimizers"
        raise ConfigError(f"{KEY}: {several}, and Echelon steps one; return one with parameter groups")
    if not optimizers or not isinstance(optimizers[0], Optimizer):
        kind = type(optimizers[0]).__name__ if optimizers else "None"
        raise ConfigError(f"{KEY}: returned {kind}, and Echelon needs an optimizer of torch's; return one")
    refuse_own_state(optimizers[0])
    return optimizers[0], schedulers


def refuse_own_state(optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer has what a copy of it for other groups can't have.

    A wrapper such as Lookahead or SAM steps the groups of the optimizer inside. Keys of groups go into checkpoints.
    """
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            inner = type(value).__name__
            raise ConfigError(
                f"{KEY}: {kind}.{name} is another optimizer, whose groups Echelon can't replace; return {inner} "
                f"itself, or an optimizer of one class"
            )
    own = {key: group[key] for group in optimizer.param_groups for key in group if key not in optimizer.defaults}
    for key, value in own.items():
        if key in OWN or key == "match":
            raise ConfigError(f"{KEY}: a group has the key {key!r}, which means something else in Echelon; rename it")
        if key != "params" and not isinstance(value, str | int | float | None):
            raise ConfigError(
                f"{KEY}: {key} of a group is {describe(value)}, and a checkpoint takes numbers and texts; keep it "
                "elsewhere"
            )


def refuse_no_rate(optimizer: Optimizer) -> None:
    """Raise ConfigError if a group has no learning rate: a step computes one that nothing else knows."""
    if any(group.get("initial_lr", group.get("lr")) is None for group in optimizer.param_groups):
        kind = type(optimizer).__name__
        way = "return AdafactorSchedule(optimizer) as its scheduler, too" if kind == "Adafactor" else "give lr"
        raise ConfigError(f"{KEY}: {kind} has a group without a learning rate (lr=None); {way}")


def names_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of each group's parameters.

    Raises:
        ConfigError: A parameter is not the module's.
    """
    names = {p: name for name, p in module.named_parameters()}
    found = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in found):
        raise ConfigError(f"{KEY}: the optimizer has a tensor that is no parameter of the module; leave it out")
    return found


class ModuleSchedule:
    """The schedule of a module that is built later."""

    def __init__(self, configured: Callable[[], Configured]) -> None:
        self.configured = configured

    def resolve(self, total: int | None, batch: int, epoch_samples: int | None) -> Rate:
        return LaterRate(self.configured)


class LaterRate(Rate):
    def __init__(self, configured: Callable[[], Configured]) -> None:
        self.configured = configured

    def __call__(self, step: int) -> float:
        return self.configured().rate(step)

    def put(self, step: int, groups: Any, peaks: Any) -> None:
        self.configured().rate.put(step, groups, peaks)

    def is_constant(self, step: int) -> bool:
        return not self.configured().schedulers
