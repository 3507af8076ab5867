"""A trial on real ranks: its losses are those of the run, its steps are timed, and nothing of it stays."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import lines, toy
from support.configs import toy_config
from support.ranks import run_ranks

from trainer.cost.workload import Choice
from trainer.process.environment import Place
from trainer.tools.tune.configs import begun, find_start, merge, of_trial
from trainer.tools.tune.trial import run_trial, step_seconds


def train(place: Place, config: dict[str, Any]) -> dict[str, Any]:
    return run_trial(config, place, warm=2, steps=4)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return toy_config()


@pytest.mark.parametrize("world", [2, 3])
def test_losses_are_means_over_all_ranks_and_callbacks_of_a_choice_run(
    world: int, config: dict[str, Any], tmp_path: Path
) -> None:
    plain, *_ = run_ranks(world, train, of_trial(config, tmp_path / "a", 1, 60, 6))
    choice = Choice({"overlap": {}}, {"micro_batch": 2, "accumulate": None})
    answers = run_ranks(world, train, of_trial(merge(config, choice), tmp_path / "b", 1, 60, 6))
    assert len(plain["losses"]) == 6 and all(len(answer["times"]) == 4 for answer in answers)
    assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
    assert answers[0]["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert all(answer["memory_bytes"] > 1e6 and answer["precision"] == "fp32" for answer in answers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert not list((tmp_path / "a").rglob("step-*"))  # no checkpoint


EXACT = [
    Choice({"shard": {"stage": 2}}, {}),
    Choice({"shard": {"stage": 3}, "activation_checkpoint": {"policy": "selective"}}, {}),
    Choice({"pipeline": {"stages": 2, "schedule": "1f1b"}}, {"micro_batch": 3, "accumulate": None}),
]


def test_exact_layouts_have_the_losses_of_plain_training(config: dict[str, Any], tmp_path: Path) -> None:
    plain, *_ = run_ranks(2, train, of_trial(config, tmp_path / "plain", 1, 60, 6))
    for number, choice in enumerate(EXACT):
        made = of_trial(merge(config, choice), tmp_path / str(number), 1, 60, 6)
        first, other = run_ranks(2, train, made)
        assert first["losses"] == other["losses"] == pytest.approx(plain["losses"], rel=1e-4), choice


def test_losses_are_those_that_the_run_itself_logs(config: dict[str, Any], tmp_path: Path) -> None:
    (found,) = run_ranks(1, train, of_trial(config, tmp_path / "a", 1, 60, 6))
    assert toy(["trainer.run_dir=runs/r"], tmp_path).code == 0
    logged = [line["train/loss"] for line in lines(tmp_path / "runs" / "r") if "train/loss" in line]
    assert found["losses"] == pytest.approx(logged[:6], rel=1e-6)


SLEEPY = """
import time
from toy_recipe import Toy

class Points:
    def __init__(self, points):
        self.points = points
    def __len__(self):
        return len(self.points)
    def __getitem__(self, i):
        time.sleep(0.005)
        return self.points[i]

class Sleepy(Toy):
    def data(self, split):
        return Points(super().data(split))
"""


def train_beside(place: Place, config: dict[str, Any], folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    try:
        return train(place, config)
    finally:
        sys.path.remove(folder)


def test_a_trial_hears_advice_and_knows_where_the_time_went(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "sleepy_recipe.py").write_text(SLEEPY)
    config["recipe"]["_target_"] = "sleepy_recipe.Sleepy"
    config["trainer"] |= {"allow_targets": ["sleepy_recipe", "toy_recipe"], "log_every_steps": 50}
    first, other = run_ranks(2, train_beside, of_trial(config, tmp_path / "a", 1, 60, 6), str(tmp_path))
    assert {line["name"] for line in first["advice"]} >= {"data_wait"}
    (line,) = (line for line in first["advice"] if line["name"] == "data_wait")
    assert "steps wait for data for" in line["text"] and line["config"].startswith("data.workers=")
    assert first["phases"] == other["phases"] and first["phases"]["data"] > 5 * 0.005  # six samples a step
    parts = sum(seconds for name, seconds in first["phases"].items() if name != "step")
    assert parts == pytest.approx(first["phases"]["step"], rel=0.02)


def test_a_trial_goes_on_from_a_checkpoint_with_other_callbacks(config: dict[str, Any], tmp_path: Path) -> None:
    ran = toy(["trainer.run_dir=runs/r", "trainer.devices=2", "trainer.checkpoint.every_steps=20"], tmp_path)
    assert ran.code == 0, ran
    config["trainer"] |= {"resume": "auto", "run_dir": "runs/r", "max_steps": 100}
    before = sorted(path.name for path in (tmp_path / "ckpt" / "r").iterdir())
    choice = Choice({"overlap": {}}, {})
    first, _ = run_ranks(2, train, of_trial(merge(begun(config, find_start(config)), choice), tmp_path / "a", 1, 60, 6))
    logged = [line["train/loss"] for line in lines(tmp_path / "runs" / "r") if "train/loss" in line]
    assert len(first["losses"]) == 6 and max(first["losses"]) < logged[0]  # those of trained weights
    assert sorted(path.name for path in (tmp_path / "ckpt" / "r").iterdir()) == before


def test_a_run_that_ends_before_its_trial_says_so(config: dict[str, Any], tmp_path: Path) -> None:
    config["trainer"]["max_steps"] = 2
    with pytest.raises(AssertionError, match=r"tune\.warm: the run ends after \d step\(s\), before one is timed"):
        run_ranks(1, train, of_trial(config, tmp_path / "a", 1, 60, 6))


def test_a_run_that_ends_in_its_trial_has_fewer_times(config: dict[str, Any], tmp_path: Path) -> None:
    config["trainer"] |= {"max_steps": None, "max_epochs": 1}
    config["batch"] = 24
    (found,) = run_ranks(1, train, of_trial(config, tmp_path / "a", 1, 60, 6))
    assert len(found["times"]) == 2 and len(found["losses"]) == 4  # of 96 samples


def test_steps_of_a_period_count_together() -> None:
    times = [1.0, 1.0, 1.0, 5.0] * 3
    assert step_seconds(times, 1) == 1.0 and step_seconds(times, 4) == 2.0
