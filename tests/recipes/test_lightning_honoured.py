"""Each name of Lightning's objects and of torch's DataLoader is given, as a comparison shows, or refused by name."""

import inspect
from typing import Any

import pytest
import torch
from support.lightning import SILENT, by_echelon, by_lightning, make_echelon
from support.messages import refuses
from support.needs import needs
from torch import nn
from torch.utils.data import DataLoader

from recipes.lightning import Lightning
from recipes.lightning.attached import AttachedTrainer
from recipes.lightning.honoured import ARGUMENTS, DATAMODULE, HOOKS, LATER, LOG, MODULE, SET, TRAINER
from recipes.lightning.module import OPTIONS, refuse_options
from trainer.config.options import LimitOptions, Options
from trainer.errors import ConfigError

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tmp_path")]


def modules() -> Any:
    import lightning_modules

    return lightning_modules


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def set_by(thing: Any) -> set[str]:
    """The names that a constructor sets."""
    return {name for name in vars(thing) if not name.startswith("_")}


def of_module() -> set[str]:
    import lightning as L

    of_class = public(L.LightningModule) - public(nn.Module) | {"forward"}
    return of_class | (set_by(L.LightningModule()) - set_by(nn.Module()))


def of_datamodule() -> set[str]:
    import lightning as L

    return public(L.LightningDataModule) | set_by(L.LightningDataModule())


def of_trainer() -> set[str]:
    import lightning as L

    trainer = L.Trainer(**SILENT)
    return public(trainer) | set_by(trainer)


def of_log() -> set[str]:
    import lightning as L

    return set(inspect.signature(L.LightningModule.log).parameters) - {"self"}


def of_loader() -> set[str]:
    return set(inspect.signature(DataLoader.__init__).parameters) - {"self"}


@pytest.mark.parametrize(
    ("names", "tables"),
    [
        (of_module, (HOOKS, LATER, MODULE, SET)),
        (of_datamodule, (DATAMODULE, SET)),
        (of_trainer, (TRAINER,)),
        (of_log, (LOG,)),
        (of_loader, (ARGUMENTS,)),
    ],
)
def test_each_name_of_the_installed_library_is_given_or_refused(names, tables):
    known = {name for table in tables for name in (*table.given, *table.refused)}
    assert names() - known == set(), "in neither column"
    assert known - names() == set(), "not in the library"


def hook_of(name: str) -> Any:
    return lambda self, *args, **kwargs: None


@pytest.mark.parametrize("name", HOOKS.refused)
def test_a_hook_that_is_not_called_is_refused_if_a_module_has_it(name):
    own = (lambda self: [object()]) if name == "configure_callbacks" else hook_of(name)
    module = type("Own", (modules().AutoEncoder,), {name: own})
    with pytest.raises(ConfigError, match=f"^recipe.module: Own overrides {name}, which Echelon does not call; "):
        Lightning(module, modules().Numbers()).model()


@pytest.mark.parametrize("name", sorted(DATAMODULE.refused.keys() - {"test_dataloader"}))
def test_a_hook_that_is_not_called_is_refused_if_the_data_has_it(name):
    data = type("Own", (modules().Numbers,), {name: hook_of(name)})
    with pytest.raises(ConfigError, match=f"^recipe.datamodule: Own overrides {name}, which Echelon does not call; "):
        Lightning(modules().AutoEncoder, data()).data("train")


@pytest.mark.parametrize("name", LATER.refused)
def test_what_a_fit_does_not_call_is_refused_where_it_is_asked_for(name):
    module = type("Own", (modules().Predicts,), {name: hook_of(name)})
    recipe = Lightning(module, modules().Numbers())
    with pytest.raises(ConfigError) as refused:
        if "test" in name:
            recipe.data("test")
        recipe.predict(recipe.model(), torch.zeros(1))
    assert str(refused.value).startswith(
        ("recipe=lightning: has no data for split=test", "recipe.module: Own overrides")
    )


@pytest.mark.parametrize("name", MODULE.refused)
def test_a_method_without_effect_here_is_refused_where_it_is_called(name):
    module: Any = Lightning(modules().AutoEncoder, modules().Numbers()).model()
    with pytest.raises(ConfigError, match=rf"^self\.{name}\(\): {MODULE.refused[name].split('(')[0][:40]}"):
        getattr(module, name)(None)


@pytest.mark.parametrize("name", TRAINER.refused)
def test_an_attribute_of_the_trainer_that_is_not_given_is_refused_with_its_reason(name):
    view = AttachedTrainer()
    with pytest.raises(ConfigError) as refused:
        getattr(view, name)
    assert str(refused.value) == f"self.trainer.{name}: {TRAINER.refused[name]}" and not hasattr(view, name)


@pytest.mark.parametrize("name", [*LOG.refused, "on_epochs"])
def test_an_argument_of_log_that_asks_for_another_number_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^self\.log\('acc', {name}='sum'\): "):
        refuse_options("acc", {name: "sum"}, 2)
    refuse_options("acc", {"reduce_fx": "mean", "rank_zero_only": True, "sync_dist": True, "enable_graph": False}, 1)


def test_arguments_of_log_by_place_are_lightnings():
    import lightning as L

    assert tuple(inspect.signature(L.LightningModule.log).parameters)[3:] == OPTIONS


def test_an_attribute_that_is_set_in_vain_is_refused():
    view: Any = AttachedTrainer()
    for name in ("max_epochs", "limit_train_batches", "current_epoch", "gradient_clip_val"):
        with pytest.raises(
            ConfigError, match=rf"^self\.trainer\.{name}=3: Echelon does not follow it; change the config"
        ):
            setattr(view, name, 3)


def plain(value: Any) -> Any:
    """Numbers, texts and lists of them as they are; of an object what decides its use."""
    if isinstance(value, nn.Module):
        return [tuple(p.shape) for p in value.parameters()]
    if isinstance(value, torch.optim.Optimizer):
        return [
            value.__class__.__name__.removeprefix("Lightning"),
            [len(group["params"]) for group in value.param_groups],
        ]
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return value.get_last_lr()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor | torch.device | torch.dtype):
        return str(value)
    return value if isinstance(value, int | float | str | None) else type(value).__name__


# Of the run, which both have otherwise: folders, callbacks, and objects that stand for Lightning's own.
OWN = {"default_root_dir", "log_dir", "callbacks", "print", "strategy", "callback_metrics", "logged_metrics", "trainer"}
OWN |= {"lr_scheduler_configs"}  # whose settings CALLS reads


def same(module: Any) -> bool:
    return module.optimizers() is module.optimizers() and isinstance(module.optimizers(), torch.optim.AdamW)


CALLS = {
    "self.optimizers": lambda module: module.optimizers(),
    "optimizer": lambda module: type(module.optimizers().optimizer).__name__,
    "use_pl_optimizer": lambda module: type(module.optimizers(use_pl_optimizer=False)).__name__,
    "same": lambda module: module.optimizers().optimizer is module.trainer.optimizers[0] and same(module),
    "self.lr_schedulers": lambda module: module.lr_schedulers(),
    "self.all_gather": lambda module: module.all_gather(torch.ones(2)),
    "self.print": lambda module: module.print("seen"),
    "strategy.reduce": lambda module: module.trainer.strategy.reduce(torch.ones(2)),
    "strategy.broadcast": lambda module: module.trainer.strategy.broadcast("text"),
    "strategy.barrier": lambda module: module.trainer.strategy.barrier(),
    "strategy.root_device": lambda module: module.trainer.strategy.root_device,
    "strategy.model": lambda module: module.trainer.strategy.model,
    "trainer is": lambda module: module.trainer.lightning_module is module,
    "data's": lambda module: module.trainer.datamodule.trainer is module.trainer,
    "trainer.print": lambda module: module.trainer.print("seen"),
    "schedulers": lambda module: [config.interval for config in module.trainer.lr_scheduler_configs],
}


@pytest.mark.filterwarnings("ignore")
def test_what_is_set_on_the_optimizer_is_the_runs_and_manual_steps_are_refused():
    trainer = make_echelon(modules().AutoEncoder, modules().Numbers(), max_steps=1, validate_every=None)
    optimizer = trainer.module.optimizers()
    optimizer.param_groups[0]["lr"], optimizer.mark = 0.5, 3
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5 and trainer.optimizer.mark == 3
    with refuses("self.optimizers().toggle_model()", "training_step"):
        optimizer.toggle_model()
    trainer.close()


def read(module: Any) -> dict[str, Any]:
    """Return what a module reads of itself and of its trainer."""
    methods = {*CALLS, "optimizers", "lr_schedulers", "all_gather", "print", "log", "log_dict"}
    methods |= {"load_from_checkpoint", "save_hyperparameters", "freeze", "unfreeze"}
    found = {f"trainer.{name}": plain(getattr(module.trainer, name)) for name in TRAINER.given.keys() - OWN}
    found |= {f"self.{name}": plain(getattr(module, name)) for name in MODULE.given.keys() - OWN - methods}
    return found | {name: plain(call(module)) for name, call in CALLS.items()}


def test_a_module_reads_what_it_reads_in_lightning():
    kind, data = modules().Reads, modules().Numbers
    kind.read = staticmethod(read)
    clip = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "log_every_n_steps": 1}
    theirs = by_lightning(kind, data(), max_epochs=2, **clip).lightning_module.found
    ours: Any = by_echelon(kind, data(), 8, max_epochs=2, clip_norm=0.5, validate_every="1 epochs").module
    assert [sorted(found) for found in ours.found] == [sorted(found) for found in theirs] and len(theirs) == 26
    different = {
        f"{i}: {name}: {theirs[i][name]} in Lightning, {found[name]} here"
        for i, found in enumerate(ours.found)
        for name in found
        if found[name] != theirs[i][name] and not (isinstance(found[name], float) and found[name] == theirs[i][name])
    }
    assert not different, "\n".join(sorted(different))


def test_hooks_are_called_in_lightnings_order():
    """Those of training, and those of a validation, which Lightning runs before the end of the epoch."""
    hooks = HOOKS.given.keys() - {"predict_step", "predict_dataloader", "train_dataloader", "val_dataloader", "forward"}
    kind = modules().noting(modules().Classifier, hooks)
    data = modules().noting(modules().Numbers, ("prepare_data", "setup", "teardown"))
    by_lightning(kind, data(), max_epochs=1, limit_train_batches=2, limit_val_batches=1)
    theirs, of_data = list(kind.noted), set(data.noted)
    kind.noted.clear()
    data.noted.clear()
    limits = LimitOptions(train=2, validation=1)
    trainer = make_echelon(kind, data(), 4, max_epochs=1, validate_every=None, limit_batches=limits)
    before = list(kind.noted)
    kind.noted.clear()
    trainer.fit()
    assert {*before, *kind.noted} == set(theirs) == hooks and set(data.noted) == of_data
    ours, rest = list(kind.noted), {"prepare_data", "setup", "configure_model", "configure_optimizers"}
    rest |= {"on_before_batch_transfer", "on_after_batch_transfer"}
    for validates in (False, True):
        own = [[c for c in calls if c not in rest and ("valid" in c) == validates] for calls in (ours, theirs)]
        assert own[0] == own[1]


def test_attributes_of_the_view_are_those_of_lightnings_trainer():
    """`use one of` names no helper of Echelon's."""
    with pytest.raises(ConfigError) as refused:
        AttachedTrainer().max_epoch  # noqa: B018 it raises
    assert "Echelon has no such attribute" in str(refused.value) and "epochs_at" not in str(refused.value)
    assert Options().log_every_steps
