"""A run of four steps whose checkpoints `evaluate` and `predict` read."""

from pathlib import Path

from support.cli import run

TRUSTED = "trainer.allow_targets=[mine,toy_recipe]"
RECIPE = """
from toy_recipe import Toy as Base

class Mine(Base):
    def __init__(self, width: int = 8):
        super().__init__(width=width, dtype="float64")

    def data(self, split):
        return None if split == "none" else super().data(split)

    def metrics(self, model, batch):
        error = (model(batch["x"]) - batch["y"]).abs().mean(dim=1)
        return {"error": (error.sum(), len(error))}

    def predict(self, model, batch):
        return model(batch["x"])
"""
CONFIG = """
# @package _global_
recipe: {_target_: mine.Mine, width: 8}
batch: 12
micro_batch: 2
trainer: {max_steps: 4, allow_targets: [mine, toy_recipe], run_dir: runs/r, checkpoint: {every_steps: 2, keep: 9}}
data: {workers: 0}
"""


def train(folder: Path) -> None:
    """A run of 4 steps that kept an average, which its validation is of."""
    (folder / "mine.py").write_text(RECIPE)
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "conf" / "recipe" / "mine.yaml").write_text(CONFIG)
    average = "+callbacks.avg={_target_: trainer.callbacks.ema.EMA, decay: 0.5}"
    done = run(["--config-dir", "conf", "recipe=mine", average, "~callbacks.tensorboard"], folder)
    assert done.code == 0, done.err
