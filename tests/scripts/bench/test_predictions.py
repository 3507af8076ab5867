"""Predictions beside trials: the choices, the table, and a tiny cell on real ranks."""

from pathlib import Path

import pytest

from scripts.bench import predictions, tune
from scripts.bench.comm.rank import SIZES, Size
from trainer.config.folders import CONF
from trainer.cost.workload import Choice
from trainer.process.environment import Place
from trainer.tools.tune.candidates import NOTHING
from trainer.tools.tune.tasks import run_task
from trainer.tools.tune.team import Team


def test_the_choices_name_callbacks_that_there_are() -> None:
    names = {name for choice in predictions.CHOICES for name in choice.callbacks}
    assert names <= {path.stem for path in (CONF / "callbacks").glob("*.yaml")} and len(names) > 6


def test_a_row_compares_with_the_median_of_the_rounds() -> None:
    row = predictions.row(tune.Cell("1gbit", 2, "10M", 2), NOTHING, 1.1, [1.0, 5.0, 0.9])
    assert (row["part"], row["choice"]) == ("1gbit, 2 hosts of 2 ranks, 10M", "today's config")
    assert (row["measured s"], row["error, percent"]) == (1.0, pytest.approx(10.0))
    assert [goal.met for goal in predictions.goals([row, {"error, percent": -12.0}])] == [False]


@pytest.mark.slow
def test_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["predictions"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setitem(SIZES, "10M", Size(8, 1, 1, 10))
    monkeypatch.setitem(tune.STEPS, "unlimited", 2)
    monkeypatch.setattr(
        predictions, "CHOICES", (NOTHING, Choice({"overlap": {}}, {}), Choice({"hierarchical": {}}, {}))
    )
    team = Team(Place(0, 2, 0, 2, starts=True), tmp_path, run_task)
    try:
        rows = predictions.measure(tune.Cell("unlimited", 2, "10M"), team, tmp_path, rounds=1)
    finally:
        team.close()
    assert [row["choice"] for row in rows][:2] == ["today's config", "+overlap"]
    assert all(row["predicted s"] > 0 and row["measured s"] > 0 for row in rows)
