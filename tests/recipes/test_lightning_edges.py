"""What a module asks for by other ways than its methods: done as in Lightning, or one line that names it."""

from typing import Any

import pytest
import torch
import torchmetrics
from support.lightning import by_echelon, by_lightning, same_weights
from support.needs import needs
from torch import nn

from recipes.lightning import Lightning, LightningHooks
from trainer.callbacks.swa import SWA
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


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
