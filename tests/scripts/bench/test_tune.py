"""The search beside its grid: today's configs, the goals, and a tiny cell on real ranks."""

from pathlib import Path

import pytest

from scripts.bench import tune as bench
from scripts.bench.comm.rank import SIZES, Size
from trainer.process.environment import Place
from trainer.tools.tune.tasks import run_task
from trainer.tools.tune.team import Team


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> bench.Cell:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setitem(SIZES, "10M", Size(8, 1, 1, 10))
    return bench.Cell("unlimited", 2, "10M")


def test_todays_config_of_a_cell(cell: bench.Cell, tmp_path: Path) -> None:
    config = bench.make_config(cell, tmp_path)
    assert (config["batch"], config["micro_batch"], config["recipe"]["size"]) == (32, 4, "10M")


def test_goals_are_of_the_worst_cell_and_of_the_median_error() -> None:
    rows = [
        {"of the best": 1.0, "of its time": 0.2, "error": 0.01},
        {"of the best": 0.9, "of its time": 0.05, "error": 0.07},
    ]
    assert [goal.met for goal in bench.goals(rows)] == [False, False, True]
    assert [goal.value for goal in bench.goals(rows)] == pytest.approx([0.9, 0.2, 0.04])


@pytest.mark.slow
def test_a_cell(cell: bench.Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.STEPS, "unlimited", 2)
    team = Team(Place(0, 2, 0, 2, starts=True), tmp_path, run_task)
    try:
        (row,) = bench.measure(cell, team, tmp_path, grid=3, rounds=1)
    finally:
        team.close()
    assert (row["tried"], row["cell"]) == (3, "unlimited, 2 hosts, 10M") and row["grid"] > 100
    assert row["best s"] > 0 and row["tuned s"] > 0 and row["grid s"] > row["tune s"] * 0.1
