"""Predictions of LightningModules: those of Lightning's Trainer, on any number of ranks, and by the command."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cli import QUICK, run
from support.needs import needs
from support.ranks import run_ranks

from recipes.lightning import Lightning, LightningHooks
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.tools import predict
from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.usefixtures("tmp_path")]


def made(place: Place, name: str = "Predicts") -> Trainer:
    import lightning_modules

    recipe = Lightning(getattr(lightning_modules, name), lightning_modules.Unlabelled())
    return Trainer(
        recipe, {"lightning": LightningHooks()}, recipe.optimizer, recipe.schedule, batch=4 * place.world,
        place=place, data=DataOptions(workers=0), options=Options(max_steps=2, run_dir="runs/r"),
    )  # fmt: skip


def predicted(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = made(place)
    trainer.fit()
    first, again = trainer.predict("predict"), trainer.predict("predict")
    assert torch.equal(first["logits"], again["logits"])
    return first.columns, trainer.module.state_dict()


def by_lightning(weights: Any) -> torch.Tensor:
    import lightning as L
    import lightning_modules

    module = lightning_modules.Predicts()
    module.load_state_dict(weights)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    found: Any = trainer.predict(module, lightning_modules.Unlabelled())
    return torch.cat([batch["logits"] for batch in found])


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_predictions_are_those_of_lightnings_trainer(world):
    """13 samples in batches of 4: the last one is smaller."""
    for columns, weights in run_ranks(world, predicted):
        expected = by_lightning(weights)
        torch.testing.assert_close(columns["logits"], expected)
        assert torch.equal(columns["class"], expected.argmax(1)) and len(expected) == 13


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LogsPredictions", r"^predict_step: self\.log\('size'\): predictions have no metrics; return the value$"),
        (
            "HooksPredictions",
            "^recipe.module: HooksPredictions overrides on_predict_model_eval, which Echelon does not call; do that",
        ),
    ],
)
def test_what_a_prediction_lacks_is_refused_by_name(name, words):
    trainer = made(Place(), name)
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            trainer.predict("predict")
    trainer.close()


@pytest.mark.slow
def test_the_command_predicts_from_a_checkpoint(tmp_path):
    words = ["recipe=lightning", "recipe.module=lightning_modules.Predicts", "trainer.max_steps=2", "batch=4"]
    words += ["recipe.datamodule=lightning_modules.Unlabelled", "trainer.run_dir=runs/l", *QUICK]
    allow = "trainer.allow_targets=[lightning_modules]"
    done = run([*words, allow], tmp_path, timeout_s=120)
    assert done.code == 0, done.err
    words = ["runs/l", "--split=predict", "--output=found.safetensors", allow]
    done = run(words, tmp_path, predict.__name__, timeout_s=120)
    assert done.code == 0, done.err
    found = load_file(tmp_path / "found.safetensors")
    assert found["index"].tolist() == list(range(13)) and torch.equal(found["logits"].argmax(1), found["class"])
