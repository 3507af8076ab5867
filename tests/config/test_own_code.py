"""A recipe from a file of the working folder: what is taken, what is refused, and whose packages a config may name."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from support.cli import run
from support.messages import refuses

from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.config.own_code import own_name, replace_file
from trainer.errors import ConfigError

LINE = """
import torch
from torch.utils.data import TensorDataset


class Line:
    def __init__(self, samples: int = 64) -> None:
        self.samples = samples

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self, split):
        x = torch.rand(self.samples, 1)
        return TensorDataset(x, 2 * x + 1)

    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)
"""
SHORT = ["batch=8", "trainer.max_steps=4", "trainer.accelerator=cpu", "data.workers=0", "~callbacks.tensorboard"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as the command does
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    importlib.invalidate_caches()
    (tmp_path / "ownline").mkdir()
    (tmp_path / "ownline" / "my_line.py").write_text(LINE)
    return tmp_path


def test_one_file_trains_resumes_and_is_evaluated(tmp_path: Path) -> None:
    """No YAML, no allow_targets: a run records that its own command has trusted the package."""
    done = run(["recipe=ownline/my_line.py", "recipe.samples=48", *SHORT, "trainer.run_dir=runs/r"], tmp_path)
    assert done.code == 0, done.err
    events = (tmp_path / "runs/r/logs/rank0.log").read_text()
    assert "recipe=ownline/my_line.py recipe.samples=48" in events and "~recipe" not in events
    again = run(["resume", "runs/r", "trainer.max_steps=6"], tmp_path)
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["samples"] == 48
    assert run(["evaluate", "runs/r"], tmp_path).code == 0


def test_the_config_is_that_of_no_recipe_in_conf() -> None:
    """Settings of the default recipe, such as its batch, do not leak."""
    (job,) = compose(["recipe=ownline/my_line.py:Line", "batch=8"], [CONF])
    assert job.config["recipe"] == {"_target_": "ownline.my_line.Line"} and job.recipe == "line"
    assert job.config["trainer"]["allow_targets"] == ["ownline"] and job.config["trainer"]["max_steps"] is None
    assert job.argv == ["recipe=ownline/my_line.py:Line", "batch=8"]
    Path("ownline/inherits.py").write_text("from ownline.my_line import Line\n\nclass Other(Line):\n    pass\n")
    (job,) = compose(["recipe=ownline/inherits.py", "batch=8"], [CONF])
    assert job.config["recipe"]["_target_"] == "ownline.inherits.Other"
    Path("ownline/both.py").write_text(
        "from ownline import my_line\n"
        + Path("ownline/my_line.py").read_text()
        + "\n\nclass Child(Line):\n    pass\n\nclass Net(nn.Module):\n    pass\n"
    )
    with refuses("recipe=ownline/both.py", "2 recipes: Line, Child"):
        compose(["recipe=ownline/both.py", "batch=8"], [CONF])
    (first, second) = compose(["-m", "recipe=ownline/my_line.py:Line", "batch=8,9"], [CONF])
    assert [first.argv[0], second.argv[0]] == ["recipe=ownline/my_line.py:Line"] * 2
    assert [first.argv[1], second.argv[1]] == ["batch=8", "batch=9"]


def test_packages_here_need_no_permission_and_others_do(tmp_path: Path) -> None:
    for place in ("callbacks.own._target_=ownline.my_line.Own", "data.map=[ownline.my_line.own]"):
        (job,) = compose([place, "optimizer._target_=elsewhere.Optimizer"], [CONF])
        assert job.config["trainer"]["allow_targets"] == ["ownline"]
    (job,) = compose(["recipe=lightning", "recipe.module=ownline.my_line.Module"], [CONF])
    assert job.config["trainer"]["allow_targets"] == ["ownline"]
    (job,) = compose(["trainer=5"], [CONF])  # which the check refuses
    stored = tmp_path / "config.yaml"
    hydra = "hydra: {run: {dir: .}, sweep: {dir: ., subdir: .}, output_subdir: null}\n"
    none = "defaults: [_self_, override hydra/job_logging: none, override hydra/hydra_logging: none]\n"
    stored.write_text(f"{none}{hydra}recipe: {{_target_: ownline.my_line.Line}}\ntrainer: {{allow_targets: []}}\n")
    (job,) = compose([], [CONF], stored)
    assert job.config["trainer"]["allow_targets"] == []  # whoever wrote it


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("recipe=ownline/none.py", "there is no such file"),
        ("recipe=ownline/my_line.py,ownline/my_line.py", "there is no such file"),
        ("recipe=ownline/my_line.py:Lin", "did you mean Line?"),
        ("recipe=own-line.py", "own-line can't be imported"),
        ("recipe=json.py", "another json"),
        ("recipe=cut.py", "line 1"),
        ("recipe=two.py", "recipes: One, Two; name the class, as in recipe=two.py:One"),
        ("recipe=none.py", "no class with model, data and loss"),
        ("recipe=../outside.py", "outside of the working folder"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(word: str, said: str, tmp_path: Path) -> None:
    two = LINE.replace("Line:", "One:") + LINE.replace("Line:", "Two:")
    files = {
        "own-line.py": LINE,
        "json.py": LINE,
        "cut.py": "class",
        "two.py": two,
        "none.py": "",
        "../outside.py": LINE,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with refuses(word, said):
        replace_file([word])


def test_one_recipe_is_given() -> None:
    with refuses("recipe=bert_tiny", "recipe=ownline/my_line.py"):
        replace_file(["recipe=ownline/my_line.py", "recipe=bert_tiny"])
    assert replace_file(["recipe=toy", "batch=8"]) == (["recipe=toy", "batch=8"], {})
    assert own_name(["~recipe", "++recipe._target_=a.b.NextByteLM2"]) == "next_byte_lm2"
    with pytest.raises(ConfigError):
        replace_file(["recipe=ownline/my_line.py", "recipe=ownline/my_line.py"])
