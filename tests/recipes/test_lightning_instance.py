"""Hooks that a module sets on its object, and methods of Lightning that it overrides: called as there, or refused."""

from typing import Any

import pytest
import torch
from support.lightning import by_echelon, by_lightning, make_echelon, same_weights
from support.messages import refuses
from support.needs import needs

from recipes.lightning import Lightning
from recipes.lightning.honoured import HOOKS
from recipes.lightning.module import REMOVED
from trainer.errors import ConfigError

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tmp_path")]

CALLED = sorted(HOOKS.given.keys() - {"predict_step", "predict_dataloader", "train_dataloader", "val_dataloader"})


def modules() -> Any:
    import lightning_modules

    return lightning_modules


def noting(own: Any, note: Any, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return own(*args, **kwargs)

    return call


def module_that_sets(calls: list[str], names: Any) -> Any:
    """Return a class whose constructor sets methods on the object, which note their calls."""

    class Own(modules().Classifier):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, noting(getattr(self, name), calls.append, name))

    return Own


def test_hooks_of_the_object_are_called_as_lightning_does():
    """All that a fit calls, in its order, and with its weights."""
    theirs: list[str] = []
    ours: list[str] = []
    data = modules().Numbers
    of_lightning = by_lightning(module_that_sets(theirs, CALLED), data(), max_epochs=1)
    trainer = make_echelon(module_that_sets(ours, CALLED), data(), 4, max_epochs=1, validate_every=None)
    ours.clear()  # two micro-batches are tried before
    trainer.fit()
    assert same_weights(trainer.module, of_lightning.lightning_module)
    early = {"prepare_data", "setup", "configure_model", "configure_optimizers"}
    received = {"on_before_batch_transfer", "on_after_batch_transfer"}
    for validates in (False, True):
        own = [
            [c for c in calls if c not in early | received | {"forward"} and ("valid" in c) == validates]
            for calls in (ours, theirs)
        ]
        assert own[0] == own[1] and own[0]
    assert set(theirs) - set(ours) <= early and {"forward", *received} <= set(ours)


def test_a_forward_pass_of_the_object_is_the_modules():
    class Own(modules().Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.forward = self.scaled

        def scaled(self, x: Any) -> Any:
            return 3 * self.head(self.backbone(x))

    theirs = by_lightning(Own, modules().Numbers(), max_epochs=1)
    ours: Any = by_echelon(Own, modules().Numbers(), max_epochs=1)
    assert same_weights(ours.module, theirs.lightning_module)
    assert not same_weights(
        ours.module, by_lightning(modules().Classifier, modules().Numbers(), max_epochs=1).lightning_module
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "__init__") for name in (*HOOKS.refused, *REMOVED)), ("backward", "setup"), ("backward", "on_fit_start")],
)
def test_a_hook_of_the_object_that_is_not_called_is_refused(name, where):
    def give(self: Any, *_: Any) -> None:
        setattr(self, name, lambda *_: [object()])

    def init(self: Any) -> None:
        super(own, self).__init__()
        give(self)

    own: Any = type("Own", (modules().AutoEncoder,), {where: init if where == "__init__" else give})
    with pytest.raises(ConfigError, match=f"^recipe.module: Own overrides {name}, which Echelon does not call; "):
        if where == "on_fit_start":
            by_echelon(own, modules().Numbers(), max_steps=1)
        Lightning(own, modules().Numbers()).model()


@pytest.mark.parametrize("name", ["on_exception", "on_after_batch_transfer"])
def test_a_hook_of_the_datas_object_that_is_not_called_is_refused(name):
    data: Any = modules().Numbers()
    setattr(data, name, lambda *_: None)
    with pytest.raises(ConfigError, match=f"^recipe.datamodule: Numbers overrides {name}, which Echelon does not"):
        by_echelon(modules().AutoEncoder, data, max_steps=1)


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step"])
def test_a_hook_of_gradients_that_is_set_after_the_steps_are_composed_is_refused(name):
    class Own(modules().AutoEncoder):
        def on_fit_start(self) -> None:
            setattr(self, name, lambda *_: None)

    with pytest.raises(ConfigError, match=rf"^recipe\.module: Own\.{name} was set when the steps were composed alr"):
        by_echelon(Own, modules().Numbers(), max_steps=1)


def test_what_the_objects_hook_takes_from_the_logger_is_refused():
    class Own(modules().AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.on_train_epoch_end = self.write

        def write(self) -> None:
            self.logger.experiment.add_scalar("x", 1.0)

    with refuses("recipe.module", "Own.on_train_epoch_end", "self.logger.experiment", "self.logger", "self.log"):
        by_echelon(Own, modules().Numbers(), max_steps=1)


def test_a_module_that_overrides_log_is_obeyed():
    """Lightning calls the module's own method; `super()` is Echelon's."""

    class Own(modules().AutoEncoder):
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(f"{name}_twice", 2 * value, **options)

        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return [super().optimizers(use_pl_optimizer)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (optimizer,) = self.optimizers()
            return super().training_step(batch, batch_idx) * optimizer.param_groups[0]["lr"]

    theirs = by_lightning(Own, modules().Numbers(), max_epochs=1)
    ours: Any = by_echelon(Own, modules().Numbers(), max_epochs=1)
    assert same_weights(ours.module, theirs.lightning_module)
    expected = theirs.callback_metrics["train_loss_twice"].item()
    assert ours.last_metrics["train/loss_twice"] == pytest.approx(expected) and torch.isfinite(torch.tensor(expected))
