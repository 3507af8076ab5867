"""A user's own recipe, in their own package outside the repo, in under 40 lines."""

import json

from support.cli import run

CONFIG = """\
# @package _global_
# My numbers
recipe: {_target_: mine.recipe.Mine, width: 8}
batch: 16
trainer: {max_steps: 30, allow_targets: [mine]}
data: {workers: 0}
"""
RECIPE = """\
import torch
from torch import nn
from torch.utils.data import Dataset


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor([i / 64]), torch.tensor([2 * i / 64])


class Mine:
    def __init__(self, width: int = 4):
        self.width = width

    def model(self):
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def data(self, split):
        return Numbers()

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
"""


def test_it_trains_validates_and_resumes(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "recipe.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(CONFIG)
    assert len((CONFIG + RECIPE).splitlines()) < 40
    assert "trainer" not in RECIPE
    words = ["--config-dir", "conf", "recipe=mine", "trainer.run_dir=runs/mine", "optimizer.lr=0.02"]
    done = run(words, tmp_path)
    assert done.code == 0, done.err
    first = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert first["val/loss"] < 0.2
    done = run([*words, "trainer.resume=ckpt/last.pt", "trainer.max_steps=60"], tmp_path)
    assert done.code == 0, done.err
    again = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert (again["steps"], again["samples"]) == (60, 960)
    assert again["val/loss"] < first["val/loss"]
    assert "My numbers" in run(["--config-dir", "conf", "--help"], tmp_path).out
