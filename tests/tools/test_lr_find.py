"""The range test: the rates, the curve's suggestions by hand, and the command on a recipe whose best rate is known."""

import json
import math
import random
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment, run
from support.messages import refuses
from support.quick import quick

from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.tools import lr_find
from trainer.tools.tune.configs import of_trial
from trainer.tools.tune.start import one_job

# c x^2 / 2 in each of 8 directions, with c from 0.2 to 2, without noise: gradient descent diverges above the rate 1.
RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Bowl:
    def model(self):
        model = nn.Linear(8, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def data(self, split):
        return TensorDataset(torch.ones(64, 1)) if split == "train" else None

    def loss(self, model, batch):
        curvature = torch.linspace(0.2, 2.0, 8)[:, None]
        return (curvature * model(torch.eye(8)) ** 2).sum() / 2 + 1e-4
"""
YAML = """# @package _global_
# A bowl
recipe: {_target_: bowl.Bowl}
defaults: [{override /optimizer: sgd}, _self_]
batch: 8
optimizer: {lr: 0.5, momentum: 0.0, weight_decay: 0.0}
trainer: {max_steps: 5, allow_targets: [bowl], accelerator: cpu, clip_norm: null}
data: {workers: 0}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bowl.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "bowl.yaml").write_text(YAML)
    return tmp_path


def find(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.tools.lr_find", *words, "--config-dir", "conf", "recipe=bowl"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def test_rates_grow_by_the_same_factor() -> None:
    rates = [lr_find.rate(step, 5, 1e-4, 1.0) for step in range(5)]
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_an_average_of_equal_losses_is_that_loss_from_the_start() -> None:
    assert lr_find.smooth([3.0] * 4) == pytest.approx([3.0] * 4)
    assert lr_find.smooth([1.0, 2.0]) == pytest.approx([1.0, (0.1 * 2 + 0.09) / 0.19])


def falling(rate: float) -> float:
    """The loss of 7.45 falls by 0.45 around a rate of 0.005, and grows above 0.2."""
    x = math.log10(rate)
    return 7.45 - 0.45 / (1 + math.exp(-3 * (x + 2.3))) + 10 * max(0.0, x + 0.7)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_suggestions_are_where_the_curve_says(noise: float) -> None:
    rates = [lr_find.rate(step, 100, 1e-7, 3.0) for step in range(100)]
    for seed in range(100):
        draw = random.Random(seed)
        found = lr_find.suggest(rates, [falling(rate) + draw.gauss(0, noise) for rate in rates])
        assert 1e-3 <= found["steepest"] <= 2e-2 and 3e-3 <= found["tenth"] <= 5e-2


def test_a_loss_that_never_falls_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match="the loss does not fall between the rates 0"):
        lr_find.suggest([0.1, 0.5, 1.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(("losses", "step"), [([None], 1), ([0.7, None], 2), ([0.7, 0.6, None], 3)])
def test_a_loss_that_is_no_number_from_the_start_is_told(losses: list[float | None], step: int) -> None:
    options = Namespace(min=1e-3, max=1.0, steps=31, json=None, png=None)
    rate = 10 ** (-3 + (step - 1) / 10)
    with pytest.raises(ConfigError, match=rf"^the loss is not finite at step {step}, at a rate of {rate:.3g}; look "):
        lr_find.show(losses, options)


@pytest.mark.parametrize(
    ("losses", "ends"),
    [([1.0] * 20, False), ([1.0, math.nan], True), ([1.0] * 5 + [1e9], False), ([1.0] * 12 + [100.0], True)],
)
def test_the_test_ends_where_the_loss_explodes(losses: list[float], ends: bool) -> None:
    assert lr_find.diverged(losses) is ends


def test_the_rate_is_that_of_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the schedule or a group halves the rate, twice the `optimizer.lr` trains alike."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def losses(most: float, *words: str) -> list[float]:
        job = one_job(["--config-dir", "conf", "recipe=bowl", *words], "lr_find")
        assert job
        config = of_trial(job.config, folder, 1, 60, 12)
        config["trainer"] |= {"max_steps": 12, "run_dir": "run"}
        return lr_find.sweep({"config": config, "min": most / 100, "max": most}, Place())["losses"]

    plain = losses(1.0)
    assert len(plain) == 12 and plain[-1] < plain[0]
    assert losses(2.0, "schedule.lr_scaling=linear", "schedule.reference_batch=16") == pytest.approx(plain)
    assert losses(2.0, "+optimizer.groups=[{match: ['*'], lr_scale: 0.5}]") == pytest.approx(plain)


@pytest.mark.slow
def test_a_bowl(folder: Path) -> None:
    """The suggested rate converges. The loss is least above 1, until the steps have grown again what fell before."""
    before = {path.name for path in folder.iterdir()}
    done = find(folder, "--json", "out/rates.json", "--min", "1e-4", "trainer.devices=2")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "out" / "rates.json").read_text())
    assert len(found["rates"]) == len(found["losses"]) < 100 and found["losses"][0] == pytest.approx(4.4001)
    assert 0.1 < found["tenth"] < 1 and 0.001 < found["steepest"] < 1
    assert "the loss had grown too large" in done.stdout and f"optimizer.lr={found['tenth']:.2g}" in done.stdout
    assert {path.name for path in folder.iterdir()} - before <= {"out", "__pycache__"}


def test_a_picture(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    lr_find.draw([0.1, 0.2], [2.0, 1.0], [2.0, 1.5], {"steepest": 0.1, "tenth": 0.02}, folder / "a.png")
    assert (folder / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"min": 0.0}, "--min=0.0: must be more than 0"),
        ({"min": 2.0, "max": 1.0}, "--max=1: must be above --min=2, and finite"),
        ({"steps": 3}, "--steps=3: must be at least 10"),
        ({"json": Path()}, "--json=.: is a folder; name a file"),
        ({"png": Path("/proc/x/a.png")}, "--png=/proc/x: can't be written: No such file or directory; give another"),
    ],
)
def test_a_wrong_option_is_told(wrong: dict[str, Any], told: str) -> None:
    options = {"min": 1e-7, "max": 10.0, "steps": 100, "limit_s": 60.0, "json": None, "png": None, **wrong}
    with pytest.raises(ConfigError, match=re.escape(told)):
        lr_find.refuse(Namespace(**options))


def test_without_matplotlib_a_png_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = {"min": 1e-7, "max": 10.0, "steps": 100, "limit_s": 60.0, "json": None, "png": tmp_path / "a.png"}
    with refuses("--png", "matplotlib"):
        lr_find.refuse(Namespace(**options))


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    file = Path("new", "deep", "a.json")
    options = Namespace(min=1e-7, max=10.0, steps=100, limit_s=60.0, json=file, png=Path())
    with refuses("--png=.", "folder"):
        lr_find.find(options, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    quick(
        [
            (["recipe=nothing"], "recipe=nothing"),
            (
                ["--config-dir", "conf", "recipe=bowl", "optimizer.lr=0"],
                "optimizer.lr=0: must be more than 0",
            ),
            (["-m", "optimizer.lr=1,2"], "-m: gives 2 runs, and lr_find takes one; leave -m out"),
        ],
        2,
    ),
)
def test_a_mistake_is_one_line(folder: Path, words: list[str], told: str) -> None:
    done = run(["lr_find", *words], folder)
    assert done.code == 78 and done.err.count("\n") == 1 and told in done.err
