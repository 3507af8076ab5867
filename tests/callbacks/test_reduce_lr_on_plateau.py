"""Rates that follow a validation metric: those of torch's scheduler in a bare loop, also across a resume."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.optim.schedule import Constant, Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

VALUES = [3.0, 2.0, 2.5, 2.0, 2.1, 1.0, 1.0, 1.0, float("nan"), 0.99, *[2.0] * 5]


def rates_by(callback: ReduceLROnPlateau, values: list[float], warm: int = 0) -> list[list[float]]:
    """The rates of two groups after each validation of a trainer that makes no step."""
    groups = [{"lr": 0.1}, {"lr": 0.02}]
    trainer = SimpleNamespace(
        step=0, optimizer=SimpleNamespace(param_groups=groups),
        plan=SimpleNamespace(rate=SimpleNamespace(is_constant=lambda step: step > warm + 5), ahead=5),
    )  # fmt: skip
    found = []
    for trainer.step, value in enumerate(values, start=1):
        callback.on_validation_end(trainer, {callback.metric: value})
        found.append([group["lr"] for group in groups])
    return found


@pytest.mark.parametrize(
    "knobs", [{}, {"patience": 0}, {"patience": 1, "min_delta": 0.5}, {"patience": 0, "cooldown": 2}, {"mode": "max"}]
)
def test_the_rates_are_those_of_torch(knobs: dict[str, Any]):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.02)], lr=1.0)
    ours = {"patience": 3, "min_delta": 0.0, "cooldown": 0, "mode": "min"} | knobs
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, ours["mode"], 0.5, ours["patience"], ours["min_delta"], "abs", ours["cooldown"], eps=0.0
    )
    expected = []
    for value in VALUES:
        scheduler.step(value)
        expected.append([group["lr"] for group in optimizer.param_groups])
    assert rates_by(ReduceLROnPlateau(metric="val/x", factor=0.5, **knobs), VALUES) == expected
    assert expected[-1] != expected[0]


def test_the_least_rate_is_never_passed_nor_raised():
    found = rates_by(ReduceLROnPlateau("val/x", factor=0.1, patience=0, min_lr=0.03), [1.0] * 4)
    assert found[1:] == [[0.03, 0.02]] * 3


def test_validations_of_the_warm_up_do_not_count():
    found = rates_by(ReduceLROnPlateau("val/x", factor=0.5, patience=0), [1.0, 2.0, 2.0, 2.0, 2.0], warm=3)
    assert [rates[0] for rates in found] == [0.1, 0.1, 0.1, 0.1, 0.05]


class Kept(Callback):
    role = Role.OBSERVE

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


class Stuck(Toy):
    """Its metric never improves."""

    def metrics(self, model, batch):
        return {"bad": (1.0, 1)}


def trained(
    place: Place, steps: int, resume: str | None = None, schedule: Any = None, leaves: int = 0
) -> tuple[list[float], Any]:
    kept = Kept()
    options = Options(
        max_steps=steps, validate_every=2, resume=resume, run_dir="runs/r", log_every_steps=1,
        checkpoint=CheckpointOptions(every_steps=2, every_minutes=None),
    )  # fmt: skip
    plateau = ReduceLROnPlateau("val/bad", factor=0.5, patience=1)
    callbacks = {"kept": kept, "plateau": plateau, "leaves": Leaves(leaves)}
    trainer = Trainer(
        Stuck(), callbacks, schedule=schedule, batch=12, options=options, data=DataOptions(workers=0), place=place
    )
    trainer.fit()
    return kept.rates, {name: value.tolist() for name, value in trainer.module.state_dict().items()}


def test_a_resume_right_after_a_reduction_keeps_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, weights = trained(Place(), 14)
    first = whole[0]
    assert whole == [first] * 6 + [first / 2] * 4 + [first / 4] * 4
    Path("runs").rename("whole"), Path("ckpt").rename("whole_ckpt")
    begun, _ = trained(Place(), 6)
    resumed, ends = trained(Place(), 14, resume="auto")
    assert begun + resumed == whole and ends == weights


class Leaves(Callback):
    """Ends the run at a step as a signal does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.step:
            trainer.stop("signal")


def test_a_run_cut_at_a_validation_reduces_after_its_resume(tmp_path, monkeypatch):
    """The resumed run makes the validation that was due, before its first step."""
    monkeypatch.chdir(tmp_path)
    whole, weights = trained(Place(), 10)
    Path("runs").rename("whole"), Path("ckpt").rename("whole_ckpt")
    begun, _ = trained(Place(), 10, leaves=6)
    resumed, ends = trained(Place(), 10, resume="auto")
    assert len(begun) == 6 and begun + resumed == whole and ends == weights


def test_ranks_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_ranks(3, trained, 10)
    assert len({json.dumps(each) for each in found}) == 1 and len(set(found[0][0])) == 2


def test_what_could_never_act_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses("callbacks.reduce_lr_on_plateau", "schedule=constant"):
        trained(Place(), 4, schedule=Linear())
    assert trained(Place(), 4, schedule=Constant(warmup=2))[0]
    with pytest.raises(ConfigError, match=r"^callbacks.reduce_lr_on_plateau.factor=1\.0: must be "):
        ReduceLROnPlateau(factor=1.0)
    options = Options(max_steps=4, validate_every=None)
    with refuses("callbacks.reduce_lr_on_plateau.metric=val/loss", "trainer.validate_every"):
        Trainer(Toy(), [ReduceLROnPlateau()], batch=12, options=options, data=DataOptions(workers=0)).fit()
