"""Validations of LightningModules: Lightning's own numbers on any number of ranks, watched names, `evaluate`."""

import json
import math
from typing import Any

import pytest
import torch
from support.cli import QUICK, run
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks

from recipes.lightning import Lightning, LightningHooks
from recipes.lightning.attached import AttachedTrainer, Logged
from recipes.lightning.validation import Validation
from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, LimitOptions, Options
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.tools import evaluate
from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.usefixtures("tmp_path")]


def made(place: Place, name: str, callbacks: Any = None, **options: Any) -> Trainer:
    import lightning_modules

    recipe = Lightning(getattr(lightning_modules, name), lightning_modules.Numbers())
    return Trainer(
        recipe, {"lightning": LightningHooks(), **(callbacks or {})}, recipe.optimizer, recipe.schedule,
        batch=4 * place.world, place=place, data=DataOptions(workers=0),
        options=Options(**{"max_steps": 4, "run_dir": "runs/r", "validate_every": 2, "timeout_s": 60.0, **options}),
    )  # fmt: skip


def validated(place: Place, name: str, sharded: bool = False) -> tuple[Any, ...]:
    trainer = made(place, name, {"shard": Shard(stage=3)} if sharded else {}, run_dir=f"runs/{sharded}")
    trainer.fit()
    if not sharded:
        assert trainer.evaluate() == trainer.validation
    return trainer.validation, None if sharded else trainer.module.state_dict()


def by_lightning(name: str, weights: Any) -> dict[str, float]:
    """The numbers of Lightning's Trainer on one rank, which has all samples."""
    import lightning as L
    import lightning_modules

    module = getattr(lightning_modules, name)()
    module.load_state_dict(weights)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    found = trainer.validate(module, lightning_modules.Numbers(), verbose=False)[0]
    return {f"val/{key.removeprefix('val_')}": value for key, value in found.items()}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["Classifier", "AtTheEnd"])
@pytest.mark.filterwarnings("ignore")
def test_numbers_are_those_of_lightnings_trainer(name, world):
    for found, weights in run_ranks(world, validated, name):
        expected = by_lightning(name, weights)
        if name == "AtTheEnd":  # each rank logs its own samples, and the number is the mean over ranks
            assert expected.pop("val/samples") == 13 and found.pop("val/samples") == pytest.approx(13 / world)
            assert expected.keys() == {"val/recall", "val/MulticlassPrecision", "val/MulticlassF1Score"}
        assert found == pytest.approx(expected, rel=1e-6)
        exact = [key for key in expected if key != "val/loss"]
        assert {key: found[key] for key in exact} == {key: expected[key] for key in exact}


@pytest.mark.slow
def test_a_rank_that_repeats_its_last_batch_counts_it_once():
    """With shard of stage 3 on 3 ranks, which have 4, 4 and 5 of 13 samples: two repeat their only micro-batch."""
    plain = run_ranks(3, validated, "Blocks")[0][0]
    for found, _ in run_ranks(3, validated, "Blocks", True):
        assert found == pytest.approx(plain, rel=1e-6) and found["val/samples"] == pytest.approx(13 / 3)


@pytest.mark.parametrize("name", ["val/recall", "val/MulticlassF1Score", "val/recal"])
def test_what_is_logged_at_the_end_is_watched_and_else_is_refused_before_step_1(name):
    best = CheckpointOptions(keep_best=f"max {name}")
    if name == "val/recal":
        with refuses("trainer.checkpoint.keep_best=val/recal", "val/recall"):
            made(Place(), "AtTheEnd", checkpoint=best)
        return
    trainer = made(Place(), "AtTheEnd", {"early_stop": EarlyStop(name, mode="max")}, checkpoint=best)
    trainer.fit()
    assert trainer.best["value"] >= trainer.validation[name] and not math.isnan(trainer.best["value"])


@pytest.mark.parametrize(
    "name, words",
    [
        ("WrongMonitor", r"^configure_optimizers\(\): monitor='val_recal': validation gives no such .* val/recall"),
        ("Silent", r"^validation_step: logs nothing and returns no number; log a metric by self.log$"),
    ],
)
def test_a_module_that_gives_no_such_metric_is_refused_before_step_1(name, words):
    with pytest.raises(ConfigError, match=words):
        made(Place(), name)


def test_two_returned_numbers_of_one_name_are_refused_as_returned():
    validation = Validation(AttachedTrainer())
    validation.view.logged = Logged()
    with pytest.raises(ConfigError) as refused:
        validation.take({"loss": 1.0, "val_loss": 1.0})
    text = "validation_step: 'val_loss' of what it returns: is 'loss' here, as 'loss' is"
    assert str(refused.value) == f"{text}, and both would be one mean; rename one"


def test_an_epoch_ends_at_the_limit_of_the_loaders_batches():
    import lightning_modules

    calls = []
    for batches in (False, True):
        recipe = Lightning(lightning_modules.Classifier, lightning_modules.Numbers(), batches=batches)
        trainer = Trainer(
            recipe, {"lightning": LightningHooks()}, recipe.optimizer, recipe.schedule, batch=4,
            options=Options(max_steps=4, run_dir=f"runs/{batches}", limit_batches=LimitOptions(train=2)),
            data=DataOptions(workers=0),
        )  # fmt: skip
        trainer.fit()
        calls.append([call for call in trainer.module.calls if call.startswith("epoch")])
    assert calls == [["epoch start", "epoch end"] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_evaluate_gives_the_bits_of_the_last_validation(world, tmp_path):
    words = [
        "recipe=lightning",
        "recipe.module=lightning_modules.AtTheEnd",
        "trainer.max_steps=4",
        f"batch={4 * world}",
    ]
    words += ["recipe.datamodule=lightning_modules.Numbers", f"trainer.devices={world}", "trainer.run_dir=runs/l"]
    allow = "trainer.allow_targets=[lightning_modules]"
    done = run([*words, *QUICK, allow], tmp_path, timeout_s=120)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "runs/l/summary.json").read_text())
    last = {key: value for key, value in summary.items() if key.startswith("val/")}
    words = ["runs/l", f"--devices={world}", "--json=found.json", allow]
    done = run(words, tmp_path, evaluate.__name__, timeout_s=120)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "found.json").read_text()) == last and len(last) == 4
    assert all(torch.isfinite(torch.tensor(list(last.values()))))
