"""The recipe of a LightningModule."""

import inspect
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from recipes.lightning.attached import AttachedTrainer
from recipes.lightning.data import collate, get_loader, samples_or_batches
from recipes.lightning.module import (
    attach,
    find,
    is_lightning,
    overrides,
    refuse_data,
    refuse_predict_hooks,
    step_arguments,
)
from recipes.lightning.optimizers import Configured, ModuleSchedule
from recipes.lightning.validation import Validation
from trainer.annotated import check_arguments
from trainer.data.batch import count_samples
from trainer.errors import ConfigError, DataError
from trainer.metrics.metric_objects import kept
from trainer.optim.groups import Groups

CHECKPOINT = "model.ckpt"


class Lightning:
    """A LightningModule with its data. It needs the callback `LightningHooks`.

    Args:
        module: A LightningModule's class, which a config names, or in Python a function that makes one.
        datamodule: A LightningDataModule's class or object; None: the module has the loaders.
        module_args: Arguments of the module's class.
        datamodule_args: Arguments of the datamodule's class.
        batches: Whether the training loader's own batches are taken, in its order. Otherwise its samples are.
    """

    targets = ("module", "datamodule")  # arguments of which a config gives the names: config/build.py imports them

    @check_arguments("recipe.")
    def __init__(
        self,
        module: Any,
        datamodule: Any = None,
        module_args: dict | None = None,
        datamodule_args: dict | None = None,
        batches: bool = False,
    ) -> None:
        refuse_others("recipe.module", module, "LightningModule")
        refuse_others("recipe.datamodule", datamodule, "LightningDataModule")
        self.module, self.module_args = module, module_args or {}
        self.datamodule, self.datamodule_args = datamodule, datamodule_args or {}
        self.batches = batches
        self.view = AttachedTrainer()
        self.schedule = ModuleSchedule(self._configured)
        self.validation = Validation(self.view)
        self.configured: Configured | None = None
        self.own_optimizer = True  # `optimizer=recipe`
        self.passes = 0  # micro-batches of this step
        self.ended: tuple[Any, ...] | None = None  # a batch whose end hooks of the module have not run
        self.predicted = 0  # batches of this rank, of the data that was opened last
        self.stages = set[str]()  # for which the data is set up
        self.loaders: dict[str, Any] = {}  # by split
        self.kept: dict[str, Any] | None = None  # attributes that `prepare_data` has set on the prototype

    def model(self) -> nn.Module:
        self.configured, self.view.composed = None, False
        module: Any = self._make_module()
        self.view.lightning_module = module
        if self.kept is None:
            module.prepare_data()
        vars(module).update(self.kept or {})
        module.setup("fit")
        module.configure_model()
        return module

    def _make_module(self) -> nn.Module:
        module = make("recipe.module_args", self.module, self.module_args)
        if not is_lightning(type(module)):
            raise ConfigError(f"recipe.module: {type(module).__name__} is no LightningModule; give a class of these")
        return attach(module, self.view)

    @cached_property
    def prototype(self) -> Any:
        """A module that trains nothing: it supplies loaders, or shows which methods are overridden."""
        return self._make_module()

    @cached_property
    def source(self) -> Any:
        """The object that has the loaders."""
        found = self.prototype
        if self.datamodule is not None:
            found = make("recipe.datamodule_args", self.datamodule, self.datamodule_args)
            refuse_data(found)
            self.view.datamodule, found.trainer = found, self.view
        if self.kept is None:
            found.prepare_data()
        return found

    def prepare_files(self, here: bool) -> None:
        """Call `prepare_data` as Lightning does: of the datamodule, then of the module, once per node or in all."""
        self.kept = self.kept or {}
        for part in dict.fromkeys((self.source, self.prototype)):
            before = dict(vars(part))
            if here and (part.prepare_data_per_node or self.view.is_global_zero):
                part.prepare_data()
            if part is self.prototype:  # the module that trains is made later
                self.kept |= {name: value for name, value in vars(part).items() if before.get(name) is not value}

    def data(self, split: str) -> Any:
        self.predicted, stage = 0, "predict" if split == "predict" else "fit"
        if stage not in self.stages:
            self.source.setup(stage)
            if self.view.datamodule is not None:
                refuse_data(self.source)
            self.stages.add(stage)
        loader = get_loader(self.source, split)
        if loader is None and split == "train":
            name = type(self.source).__name__
            raise ConfigError(f"recipe.datamodule: {name} has no train_dataloader; name a class that has one")
        if loader is None or (split == "val" and not overrides(self.prototype, "validation_step")):
            return None
        self.loaders[split] = loader
        seed = lambda: self.view.echelon.options.seed if self.view.echelon else 0  # noqa: E731
        return samples_or_batches(loader, split, self.batches, seed)

    @property
    def collate(self) -> Any:
        """A function for samples of a loader; batches come from elsewhere as they are."""
        return collate

    def optimizer(self, groups: Groups) -> Optimizer:
        """Make the optimizer that the module has configured, of Echelon's groups."""
        return self._configured().make(groups)

    def _configured(self) -> Configured:
        if self.configured is None:
            raise ConfigError("optimizer=recipe: the LightningModule is not built yet; build the Trainer first")
        return self.configured

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of `configure_optimizers`; with another optimizer, what the module leaves untrained."""
        self.configured = self.view.configured = Configured(find(model), self.view)
        groups = self.configured.parameter_groups(model)
        if self.own_optimizer:
            return groups
        held = [p for group in groups if group.get("held") for p in group["params"] if not p.requires_grad]
        untrained = [group for group in groups if group.get("freeze")]
        return untrained + ([{"params": held, "held": True}] if held else [])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        module, run = find(model), self.view.run
        if run.rehearsing or not torch.is_grad_enabled():  # swa passes data for BatchNorm without a gradient
            with kept(module.modules()):  # metrics count training alone
                output = self._training_step(model, module, self._received(module, batch), 0)
            self.view.logged.clear()
            return output["loss"]
        self.end_batch(module)
        batch = self._received(module, batch)
        index = self.passes + (run.step - self.view.steps_in(self.view.current_epoch)) * run.plan.accumulate
        self.passes += 1
        self.view.last_batch = index + 1 >= self.view.num_training_batches
        if overrides(module, "on_train_batch_start") and module.on_train_batch_start(batch, index) == -1:
            raise ConfigError("on_train_batch_start: returned -1 to skip the epoch, and Echelon trains on all data")
        output = self._training_step(model, module, batch, index)
        loss = output["loss"]
        part = loss / run.plan.accumulate if isinstance(loss, Tensor) else loss  # as Lightning gives it to hooks
        if overrides(module, "on_before_backward"):
            module.on_before_backward(part)
        if overrides(module, "on_train_batch_end"):  # later: the tensors must hold no graph
            self.ended = (tree_map(without_graph, output | {"loss": part}), batch, index)
        return loss

    def _training_step(self, model: nn.Module, module: Any, batch: Any, index: int) -> dict[str, Any]:
        """Return what `training_step` returns, by name."""
        self.view.in_training_step = True
        try:
            output = model(*step_arguments(module, "training_step", batch, index), lightning_step="training_step")
        finally:  # an error may be caught, as by auto_batch
            self.view.in_training_step = False
        found = dict(output) if isinstance(output, Mapping) else {"loss": output}
        if found.get("loss") is None:
            raise ConfigError("training_step: returned no loss, and Echelon skips no batch; return the loss")
        for name, metric in self.view.logged.metrics.items():
            if getattr(metric, "_forward_cache", None) is None:
                raise ConfigError(
                    f"training_step: self.log({name!r}) got a metric without a value of this batch; call the metric "
                    "on the batch, or log it in on_train_epoch_end"
                )
        return found

    def _received(self, module: Any, batch: Any) -> Any:
        """Return a batch after the module's own changes of it."""
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            batch = getattr(module, hook)(batch, 0) if overrides(module, hook) else batch
        try:
            self.view.batch_size = count_samples(batch)
        except (DataError, IndexError):
            self.view.batch_size = 1
        return batch

    def end_batch(self, module: Any) -> None:
        """Call the module's hooks for the end of the previous batch."""
        if self.ended:
            module.on_train_batch_end(*self.ended)
        self.ended = None

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Run `validation_step`; return what it logs, or else the numbers that it returns."""
        module, validation = find(model), self.validation
        validation.begin(module)
        batch = self._received(module, batch)
        arguments = step_arguments(module, "validation_step", batch, validation.index)
        if overrides(module, "on_validation_batch_start"):
            module.on_validation_batch_start(batch, validation.index)
        output = model(*arguments, lightning_step="validation_step")
        if overrides(module, "on_validation_batch_end"):
            module.on_validation_batch_end(output, batch, validation.index)
        return validation.take(output)

    def validation_end(self, model: nn.Module) -> dict[str, Any]:
        """Run the hooks at the end of a validation; return what they log."""
        found = self.validation.end(find(model))
        if self.configured and self.validation.index:
            self.configured.refuse_unknown({f"val/{name}" for name in self.validation.names})
        return found

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return what `predict_step` gives.

        Raises:
            ConfigError: The module has hooks `on_predict_*`, or logs.
        """
        module = find(model)
        if not self.predicted:
            refuse_predict_hooks(module)
        with self.view.predicts() as logged:
            arguments = step_arguments(module, "predict_step", self._received(module, batch), self.predicted)
            output = model(*arguments, lightning_step="predict_step")
        self.predicted += 1
        if logged.sums:
            name = next(iter(logged.sums))
            raise ConfigError(f"predict_step: self.log({name!r}): predictions have no metrics; return the value")
        return output

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a checkpoint that `load_from_checkpoint` of the module's class takes."""
        module: Any = find(model)
        own = {"hyper_parameters": dict(module.hparams), "hparams_name": module._hparams_name} if module.hparams else {}
        state = {name: value.cpu() for name, value in module.state_dict().items()}
        version = next(v for name in ("lightning", "pytorch-lightning") if (v := installed(name)))
        counters = {"epoch": 0, "global_step": 0, "loops": {}}
        torch.save({"pytorch-lightning_version": version, **counters, "state_dict": state, **own}, folder / CHECKPOINT)


def without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def make(key: str, given: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a class or a function; return any other object as it is."""
    if not callable(given) or isinstance(given, nn.Module):
        return given
    try:
        inspect.signature(given).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}={dict(arguments)}: {error}; give the arguments of {given.__qualname__}") from None
    return given(**arguments)


def refuse_others(key: str, given: Any, kind: str) -> None:
    """Refuse a class that is not Lightning's `kind`, and a name, which only a config can give."""
    if isinstance(given, str):
        raise ConfigError(f"{key}={given}: is a name, which only a config can give; in Python, give the class itself")
    if isinstance(given, type) and kind not in {each.__name__ for each in given.__mro__}:
        raise ConfigError(f"{key}={given.__module__}.{given.__qualname__}: is not a {kind}; name a class of that kind")


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
