"""The best validation: of one metric, kept beside the newest, and one whose checkpoint could be written."""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.runs import make
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.checkpoint import commit, locate
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


def test_the_newest_and_the_best_are_kept():
    # The first is not validation yet: it tells the names of the metrics.
    losses = iter([0.0, 3.0, 1.0, 2.0, 4.0, 5.0])

    class Scripted(Toy):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
            return {"loss": (torch.tensor(self.value), 1)}

        def data(self, split: str) -> Any:
            if split == "train":
                return super().data(split)
            return Script(self)

    class Script:
        def __init__(self, recipe: Any) -> None:
            self.recipe = recipe

        def __iter__(self):
            self.recipe.value = next(losses)
            yield {"x": torch.zeros(1)}

    recipe = Scripted()
    recipe.weight = lambda batch: len(batch["x"])  # pyright: ignore
    make(recipe, max_steps=10, validate_every=2, checkpoint={"keep": 2, "keep_best": "val/loss"}).fit()
    kept = [int(path.name.split("-")[1]) for path in locate.checkpoints(Path("ckpt/r"))]
    assert kept == [4, 8, 10]
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert summary["best"] == {"metric": "val/loss", "value": 1.0, "step": 4}
    assert os.readlink("ckpt/best.pt") == "r/step-00000004" and os.readlink("ckpt/last.pt") == "r/step-00000010"
    assert "best        val/loss 1 at step 4, in ckpt/r/step-00000004" in Path("runs/r/logs/rank0.log").read_text()
    best, losses = load_file("ckpt/best.pt/model.safetensors"), itertools.repeat(9.0)

    class Look(Callback):
        def on_fit_start(self, trainer) -> None:
            assert trainer.step == 4
            assert all(torch.equal(p, best[name]) for name, p in trainer.module.state_dict().items())

    make(recipe, {"look": Look()}, max_steps=6, resume="ckpt/best.pt", checkpoint={"keep_best": "val/loss"}).fit()
    assert [os.readlink(f"ckpt/{name}.pt") for name in ("best", "last")] == ["r/step-00000004", "r/step-00000006"]
    assert len(list(Path("ckpt/r").glob(".abandoned-*"))) == 2


class Scored(Toy):
    """The validation that the test says."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
        return {name: (torch.tensor(value), 1) for name, value in self.scores.items()}

    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else [{"mask": torch.ones(1)}]


def test_the_best_of_one_metric_is_not_compared_with_anothers(capsys):
    """One line tells of an accuracy whose smallest value is kept."""
    recipe = Scored()
    expected = {"val/loss": 0.5, "max val/accuracy": 0.25, "val/accuracy": 0.75}
    for n, (keep_best, value) in enumerate(expected.items(), start=1):
        recipe.scores = {keep_best.rpartition("/")[2]: value}
        trainer = make(recipe, resume="auto", max_steps=2 * n, checkpoint={"keep_best": keep_best})
        trainer.fit()
        assert trainer.best == {"metric": keep_best, "value": value, "step": 2 * n}
    assert re.findall("keep_best=.*", capsys.readouterr().out) == [
        "keep_best=val/accuracy: takes smaller as better, and larger is usual for val/accuracy; give "
        "trainer.checkpoint.keep_best='max val/accuracy'"
    ]


def test_the_best_is_one_that_could_be_written(monkeypatch):
    """Of step 4's nothing is left but its number: the next that is better than all others is kept, and told."""
    recipe, losses, real = Scored(), {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}, commit.commit

    class Validates(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            recipe.scores = {"loss": losses.get(trainer.step, 0.0)}
            if trainer.saver.writing is not None:
                trainer.saver.writing.result()  # else what is known depends on the disk

    def full(run_dir: Path, step: int, *args: Any) -> Path:
        if step == 4:
            raise OSError(28, "No space left on device")
        return real(run_dir, step, *args)

    monkeypatch.setattr(commit, "commit", full)
    recipe.scores = {"loss": 0.0}
    keep = {"keep_best": "val/loss", "every_steps": None}
    trainer = make(recipe, {"validates": Validates()}, max_steps=8, validate_every=2, checkpoint=keep)
    trainer.fit()
    best = json.loads(Path("runs/r/summary.json").read_text())["best"]
    assert best == {"metric": "val/loss", "value": 2.0, "step": 6}
    kept = [int(path.name.removeprefix("step-")) for path in locate.checkpoints(Path("ckpt/r"))]
    assert kept == [6, 8]
    losses[10] = 1.5
    again = make(recipe, {"validates": Validates()}, max_steps=10, validate_every=2, checkpoint=keep, resume="auto")
    again.fit()
    assert again.best["step"] == 10
