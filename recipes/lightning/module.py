"""Makes a LightningModule callable through wrappers: its forward pass runs the step that it is given."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from recipes.lightning.attached import AttachedTrainer, short_name
from recipes.lightning.code import logger_uses
from recipes.lightning.honoured import DATAMODULE, EMPTY, HOOKS, LATER, LOG, MODULE, SET
from trainer.errors import ConfigError

BASE = "LightningModule"  # of lightning.pytorch, or of pytorch_lightning: a package of its own
OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group")
OPTIONS += ("add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only")  # of `log`, in its order
SET_BY_MODULES = {  # attributes that must stay true -> why
    "automatic_optimization": "Echelon runs the optimizer itself; return the loss from training_step, or write a "
    "recipe",
    "strict_loading": "Echelon loads all weights; leave it out",
}
FORWARD = "own_forward"  # what a module sets as its attribute `forward`
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")  # a run decides once whether a step calls them

REMOVED = {  # hooks of Lightning 1, which Lightning 2 does not call -> what to use
    "training_epoch_end": "keep the outputs in the module, and use on_train_epoch_end",
    "validation_epoch_end": "keep the outputs in the module, and use on_validation_epoch_end",
    "training_step_end": "do that in training_step",
    "validation_step_end": "do that in validation_step",
    "on_epoch_start": "use on_train_epoch_start",
    "on_epoch_end": "use on_train_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_post_move_to_device": "do that in on_fit_start",
}


class Steps:
    """Comes before a module's own class."""

    def forward(self, *args: Any, lightning_step: str = "", **kwargs: Any) -> Any:
        """Run a method of the module, or else its own forward pass."""
        if lightning_step:
            return getattr(self, lightning_step)(*args)
        own: Any = vars(self).get(FORWARD) or super().forward  # pyright: ignore[reportAttributeAccessIssue] of the module's own class
        return own(*args, **kwargs)


class Attached:
    """Comes between a module's own classes and Lightning's, so that a method of the module's may call `super()`."""

    view: AttachedTrainer

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Add a value to what is logged. The mean over batches and ranks is weighted by `batch_size`."""
        options = {**dict(zip(OPTIONS, args, strict=False)), **options}
        refuse_options(name, options, self.view.world_size)
        if options.get("on_epoch") and self.view.in_training_step:
            names = map(short_name, value if isinstance(value, Mapping) else [name])
            self.view.of_epoch |= dict.fromkeys(names, options.get("on_step") is not False)
        self.view.logged.add(name, value, options.get("batch_size") or self.view.batch_size)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer of the run; with `use_pl_optimizer`, as an object that has it as `optimizer`, too."""
        return self.view.strategy._lightning_optimizers[0] if use_pl_optimizer else self.view.optimizers[0]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what `refuse_unsupported` refuses, also if a hook sets it."""
        if value is False and name in SET_BY_MODULES:
            raise set_in_vain(type(self).__name__, name)
        if value and name == EMPTY:
            raise empty_allowed("recipe.module", self)
        if instead := (REMOVED | HOOKS.refused).get(name):
            raise not_called("recipe.module", self, name, instead)
        if name in GRADIENT_HOOKS and self.view.composed:
            raise ConfigError(
                f"recipe.module: {type(self).__name__}.{name} was set when the steps were composed already; set it in "
                "__init__, setup or configure_model"
            )
        super().__setattr__(FORWARD if name == "forward" else name, value)

    @property
    def _trainer(self) -> AttachedTrainer:
        return self.view

    @_trainer.setter
    def _trainer(self, trainer: Any) -> None:
        """Keep the view: Lightning sets None in a copy."""


def refuse_options(name: str, options: Mapping[str, Any], ranks: int) -> None:
    """Raise ConfigError if `self.log` is asked for another number than the mean over batches and ranks."""
    asked = {key: value for key, value in options.items() if value}
    if options.get("reduce_fx", "mean") in ("mean", "avg"):
        asked.pop("reduce_fx", None)
    if ranks == 1:
        asked.pop("rank_zero_only", None)
    for key, value in asked.items():
        if key in LOG.refused or key not in LOG.given:
            reason = LOG.refused.get(key, "Lightning has no such argument; leave it out")
            raise ConfigError(f"self.log({name!r}, {key}={value!r}): {reason}")


def refused_call(name: str, reason: str) -> Any:
    """Return a method in the place of one of Lightning's that would have no effect here."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"self.{name}(): {reason}")

    return refuse


for _name, _reason in MODULE.refused.items():
    setattr(Attached, _name, refused_call(_name, _reason))


def attach(module: Any, view: AttachedTrainer) -> Any:
    """Return the module, whose class becomes one that knows `view`.

    Raises:
        ConfigError: The module has something that Echelon can't run.
    """
    if isinstance(module, Attached):
        return module
    refuse_unsupported(module)
    attach_one(module, view)
    for child in module.children():
        if is_lightning(type(child)):  # it may log, too
            attach_one(child, view)
    return module


def attach_one(module: Any, view: AttachedTrainer) -> None:
    own = type(module)
    base = next(kind for kind in own.__mro__ if kind.__name__ == BASE)
    names = {"view": view, "__module__": own.__module__, "__qualname__": own.__qualname__}
    module.__class__ = type(own.__name__, (Steps, own, type(BASE, (Attached, base), {})), names)
    if "forward" in vars(module):
        vars(module)[FORWARD] = vars(module).pop("forward")


def is_lightning(kind: Any) -> bool:
    """Return whether a class is a LightningModule, of either package."""
    return isinstance(kind, type) and any(base.__name__ == BASE for base in kind.__mro__)


def overrides(module: Any, name: str) -> bool:
    """Return whether the module, or its class, has a method of this name that is not Lightning's."""
    base = next(kind for kind in type(module).__mro__ if kind.__name__ in (BASE, "LightningDataModule"))
    return name in vars(module) or getattr(type(module), name, None) is not getattr(base, name, None)


def set_in_vain(module: str, name: str) -> ConfigError:
    return ConfigError(f"recipe.module: {module} sets {name}=False, and {SET_BY_MODULES[name]}")


def refuse_unsupported(module: Any) -> None:
    name = type(module).__name__
    for attribute in SET_BY_MODULES:
        if getattr(module, attribute) is False:
            raise set_in_vain(name, attribute)
    if getattr(module, EMPTY, False):
        raise empty_allowed("recipe.module", module)
    for method in ("training_step", "configure_optimizers"):
        if not overrides(module, method):
            raise ConfigError(f"recipe.module: {name} has no {method}; define it")
    refuse_parameters(module)
    refuse_logger(module)
    refuse_overridden(module, "recipe.module", REMOVED)
    refuse_overridden(
        module, "recipe.module", HOOKS.refused, set() if module.configure_callbacks() else {"configure_callbacks"}
    )


def refuse_parameters(module: Any) -> None:
    """Raise ConfigError if a step needs an argument that Lightning 2 does not give."""
    for step in ("training_step", "validation_step"):
        parameters = list(inspect.signature(getattr(module, step)).parameters.values())
        unknown = [p.name for p in parameters[2:] if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        given = ["dataloader_iter"] if parameters and parameters[0].name == "dataloader_iter" else unknown
        if given and given != ["dataloader_idx"]:
            raise ConfigError(
                f"recipe.module: {type(module).__name__}.{step} takes {', '.join(given)}, and Echelon gives batch, "
                "batch_idx and dataloader_idx; leave it out"
            )


def refuse_logger(module: Any) -> None:
    """Raise ConfigError if a hook takes something from `self.logger`, which is None, and does not look first."""
    if isinstance(getattr(type(module), "logger", None), property) and overrides(module, "logger"):
        return
    methods = [name for name in HOOKS.given if overrides(module, name)]
    if use := next(logger_uses(module, methods), None):
        raise ConfigError(
            f"recipe.module: {type(module).__name__}.{use[0]} uses self.logger.{use[1]}, and self.logger is None here, "
            "as with logger=False; give numbers to self.log, or put the line under `if self.logger:`"
        )


def empty_allowed(key: str, source: Any) -> ConfigError:
    return ConfigError(f"{key}: {type(source).__name__} sets {EMPTY}=True, and {SET.refused[EMPTY]}")


def refuse_data(source: Any) -> None:
    """Raise ConfigError if a LightningDataModule overrides a hook that is not called, or allows ranks without data."""
    if getattr(source, EMPTY, False):
        raise empty_allowed("recipe.datamodule", source)
    refuse_overridden(source, "recipe.datamodule", DATAMODULE.refused, {"test_dataloader"})


def refuse_overridden(source: Any, key: str, refused: Mapping[str, str], but: Collection[str] = ()) -> None:
    for method, instead in refused.items():
        if method not in but and overrides(source, method):
            raise not_called(key, source, method, instead)


def not_called(key: str, source: Any, method: str, instead: str) -> ConfigError:
    return ConfigError(f"{key}: {type(source).__name__} overrides {method}, which Echelon does not call; {instead}")


def refuse_predict_hooks(module: Any) -> None:
    own = {name: reason for name, reason in LATER.refused.items() if name.startswith("on_predict_")}
    refuse_overridden(module, "recipe.module", own)


def step_arguments(module: Any, name: str, batch: Any, index: int) -> list[Any]:
    """Return as many of batch, its number, and the number of its loader as the method takes."""
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return [batch, index]
    named = [p for p in parameters if p.default is p.empty or p.name in ("batch_idx", "dataloader_idx")]
    return [batch, index, 0][: len(named)]


def find(model: nn.Module) -> Any:
    """Return the LightningModule in a model that callbacks may have wrapped."""
    return next(module for module in model.modules() if isinstance(module, Attached))
