"""What a module asks for by other ways than its methods: done as in Lightning, or one line that names it."""

from typing import Any

import pytest
import torch
from support.lightning import by_echelon, by_lightning, same_weights
from support.messages import refuses
from support.needs import needs
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from recipes.lightning import Lightning, LightningHooks
from trainer.callback import Callback, Role
from trainer.callbacks.swa import SWA
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tmp_path")]


def modules() -> Any:
    import lightning_modules

    return lightning_modules


def module_with(**methods: Any) -> Any:
    """Return the autoencoder with further methods."""
    return type("Own", (modules().AutoEncoder,), {"__module__": __name__, **methods})


@pytest.mark.parametrize("hook", ["setup", "configure_model", "on_fit_start"])
@pytest.mark.parametrize("name", ["automatic_optimization", "strict_loading"])
def test_an_attribute_that_a_hook_sets_is_refused_as_in_the_constructor(hook, name):
    module = module_with(**{hook: lambda self, *_: setattr(self, name, False)})
    with pytest.raises(ConfigError, match=rf"^recipe\.module: Own sets {name}=False, and Echelon "):
        by_echelon(module, modules().Numbers(), max_epochs=1)


class Lookahead(torch.optim.SGD):
    """Has the groups of the optimizer inside, as those of public packages do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([nn.Parameter(torch.ones(1))])
        self.inner, self.param_groups = inner, inner.param_groups


class Named(torch.optim.SGD):
    """Its steps are as large as a key of the group says that is not among its defaults."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["size"] * len(group["name"]))
        return loss


def named(self: Any) -> Any:
    groups = [("encoder", 0.01), ("decoder", 0.02)]
    return Named([{"params": getattr(self, name).parameters(), "name": name, "size": size} for name, size in groups])


def test_keys_of_groups_that_an_optimizer_has_no_defaults_for_are_lightnings():
    module = module_with(configure_optimizers=named)
    ours = by_echelon(module, modules().Numbers(), max_epochs=1)
    assert same_weights(ours.module, by_lightning(module, modules().Numbers(), max_epochs=1).lightning_module)


@pytest.mark.parametrize(
    ("configure", "words"),
    [
        (lambda self: Lookahead(torch.optim.Adam(self.parameters())), r"Lookahead\.inner is another .*; return Adam "),
        (lambda self: torch.optim.LBFGS(self.parameters()), r"optimizer: LBFGS\.step\(\) needs a closure"),
        (
            lambda self: torch.optim.SGD([{"params": self.parameters(), "lr_scale": 0.5}], lr=0.1),
            r"a group has the key 'lr_scale', which means something else",
        ),
        (
            lambda self: torch.optim.SGD([{"params": self.parameters(), "part": self.encoder}], lr=0.1),
            r"part of a group is .*Sequential, .* keep it elsewhere$",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_made_for_other_groups_is_refused(configure, words):
    with pytest.raises(ConfigError, match=words):
        by_echelon(module_with(configure_optimizers=configure), modules().Numbers(), max_epochs=1)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"validation_epoch_end": lambda self, outputs: None}, r"validation_epoch_end, .*use on_validation_epoch_end$"),
        ({"training_step_end": lambda self, output: output}, r"training_step_end, .*do that in training_step$"),
        ({"training_step": lambda self, batch, batch_idx, optimizer_idx: None}, r"training_step takes optimizer_idx, "),
        ({"training_step": lambda self, dataloader_iter: None}, r"training_step takes dataloader_iter, "),
    ],
)
def test_what_lightning_1_called_is_refused(methods, words):
    with pytest.raises(ConfigError, match=words):
        by_echelon(module_with(**methods), modules().Numbers(), max_epochs=1)


def unguarded(self: Any) -> None:
    self.logger.experiment.add_histogram("w", self.encoder.weight, self.current_epoch)


def helped(self: Any) -> None:
    [self.helper(name) for name in ("a", "b")]


def helper(self: Any, name: str) -> None:
    self.trainer.logger.log_metrics({name: 1.0})


def guarded(self: Any) -> None:
    if self.logger:
        self.logger.experiment.add_histogram("w", self.encoder.weight, self.current_epoch)
    if self.logger is not None:
        unguarded(self)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (
            {"on_train_epoch_end": unguarded},
            r"on_train_epoch_end uses self\.logger\.experiment, and .* None here",
        ),
        (
            {"on_train_start": helped, "helper": helper},
            r"helper uses self\.logger\.log_metrics, .* `if self\.logger:`",
        ),
        ({"on_train_epoch_end": guarded}, None),
        ({"on_test_start": unguarded, "unused": unguarded}, None),
    ],
)
def test_what_a_hook_takes_from_the_logger_is_refused_unless_it_looks_first(methods, words):
    module = module_with(**methods)
    if words is None:
        by_echelon(module, modules().Numbers(), max_epochs=1)
        return
    with pytest.raises(ConfigError, match=rf"^recipe\.module: Own\.{words}"):
        by_echelon(module, modules().Numbers(), max_epochs=1)


def test_an_argument_of_a_step_that_has_a_default_keeps_it():
    seen: list[Any] = []

    def step(self: Any, batch: Any, batch_idx: int, hiddens: Any = None) -> Any:
        seen.append(hiddens)
        return modules().AutoEncoder.training_step(self, batch, batch_idx)

    by_echelon(module_with(training_step=step), modules().Numbers(), max_epochs=1)
    assert set(seen) == {None}


def adafactor(self: Any, scheduled: bool) -> Any:
    from transformers.optimization import Adafactor, AdafactorSchedule

    made = Adafactor(self.parameters(), lr=None, warmup_init=True)
    return ([made], [{"scheduler": AdafactorSchedule(made), "interval": "step"}]) if scheduled else made


@pytest.mark.slow
@needs("transformers")
@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_without_a_rate_is_refused_with_a_way_that_works(scheduled):
    module = module_with(configure_optimizers=lambda self: adafactor(self, scheduled))
    if not scheduled:
        with pytest.raises(ConfigError, match=r"without a learning rate \(lr=None\); return AdafactorSchedule\("):
            by_echelon(module, modules().Numbers(), max_epochs=1)
        return
    ours = by_echelon(module, modules().Numbers(), max_epochs=1)
    assert same_weights(ours.module, by_lightning(module, modules().Numbers(), max_epochs=1).lightning_module)


class Growing(TensorDataset):
    """Samples that a hook scales."""

    stage = 1

    def __getitem__(self, i: int) -> Any:
        return self.tensors[0][i] * self.stage, self.tensors[0][i]


@pytest.mark.parametrize(("workers", "batches"), [(0, False), (1, False), (0, True)])
def test_a_hook_that_changes_the_samples_is_obeyed_or_refused(workers, batches):
    seen: list[float] = []
    samples = Growing(torch.ones(8, 12))

    def grow(self: Any) -> None:
        samples.stage = 1 + self.current_epoch

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(batch[0].max().item())
        return modules().AutoEncoder.training_step(self, batch, batch_idx)

    samples.stage = 1
    made = {"on_train_epoch_start": grow, "training_step": step}
    recipe = Lightning(
        module_with(**made, train_dataloader=lambda self: DataLoader(Subset(samples, range(8)), 4)), batches=batches
    )
    trainer = Trainer(
        recipe, {"lightning": LightningHooks()}, recipe.optimizer, recipe.schedule, batch=4,
        options=Options(max_epochs=2, validate_every=None, run_dir="runs/r"), data=DataOptions(workers=workers),
    )  # fmt: skip
    if workers:
        with refuses("Growing.stage", "1", "2", "data.workers=0"):
            trainer.fit()
    else:
        trainer.fit()
        assert seen == [1, 1, 2, 2]


class Late(Callback):
    """Leaves the weights a step behind, as `overlap` does."""

    role = Role.OPTIMIZER

    def on_step_end(self, trainer: Any) -> None:
        trainer.lag = 1

    def on_flush(self, trainer: Any) -> None:
        trainer.lag = 0


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_hook_of_training_finds_the_weights_of_its_step(hook):
    lags: list[int] = []
    module = module_with(**{hook: lambda self, *_: lags.append(self.view.echelon.lag)})
    by_echelon(module, modules().Numbers(), callbacks={"late": Late()}, max_epochs=1)
    assert lags and set(lags) == {0}


def log_too(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = modules().AutoEncoder.training_step(self, batch, batch_idx)  # logs train_loss
    self.log("lr", self.optimizers().param_groups[0]["lr"])
    return loss + self.more


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_a_number_by_a_name_of_echelons_is_named_if_it_is_another(more, capsys):
    by_echelon(module_with(training_step=log_too, more=more), modules().Numbers(), max_epochs=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "self.log" in line]
    assert len(lines) == (more > 0) and all("train/loss is Echelon's own number" in line for line in lines)


def test_a_pass_for_batch_norm_calls_no_hook_of_training():
    import torchmetrics  # slow

    calls: list[str] = []

    def init(self: Any) -> None:
        super(module, self).__init__()
        self.encoder.append(nn.BatchNorm1d(3))
        self.mean = torchmetrics.MeanMetric()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("seen", self.mean(torch.ones(())))
        return modules().AutoEncoder.training_step(self, batch, batch_idx)

    module = module_with(
        __init__=init, training_step=step,
        on_train_batch_start=lambda *_: calls.append("start"), on_train_batch_end=lambda *_: calls.append("end"),
    )  # fmt: skip
    recipe = Lightning(module, modules().Numbers())
    trainer = Trainer(
        recipe, {"lightning": LightningHooks(), "swa": SWA(start="2 steps", every="1 steps")}, recipe.optimizer,
        recipe.schedule, batch=8, options=Options(max_steps=4, validate_every=2, run_dir="runs/r"),
        data=DataOptions(workers=0),
    )  # fmt: skip
    trainer.fit()
    assert calls == ["start", "end"] * 4
