"""A loss is reached, and ratios and goals, by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts.bench.harness import Rounds
from scripts.bench.loss import table
from scripts.bench.loss.table import Outcome, reached

DDP = [(10, 8.0, 100.0), (20, 6.0, 200.0), (30, 5.0, 300.0)]
FASTER = [(10, 7.0, 11.0), (20, 4.5, 22.0), (30, 4.0, 33.0)]  # at DDP's final 5.0 at step 18
WORSE = [(10, 8.0, 10.0), (20, 6.0, 20.0), (30, 5.1, 30.0)]
LONGER = [(11, 8.0, 11.0), (22, 6.0, 22.0), (33, 4.0, 33.0)]  # at 5.0 at step 27.5


def outcome(**changed: Any) -> Outcome:
    """In the second round all is twice as slow, but `dgc`."""
    curves = {"ddp": DDP, "dgc": FASTER, "int8": WORSE, "onebit_adam": FASTER}
    seconds = {"": [1.0, 2.0, 1.0], "ddp": [10.0, 20.0, 10.0], "dgc": [1.5, 1.5, 1.5], "int8": [2.0, 4.0, 2.0]}
    turns = changed.pop("seconds", {**seconds, "onebit_adam": [1.0, 2.0, 1.0]})
    rounds = Rounds({name: [{"seconds": each} for each in times] for name, times in turns.items()})
    return Outcome(**{"title": "a <title>", "steps": 30, "curves": curves, "turns": rounds, **changed})


@pytest.fixture(autouse=True)
def five_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.METHODS, "onebit_adam", replace(table.METHODS["onebit_adam"], plain=5))


@pytest.mark.parametrize(
    ("loss", "step"), [(8.5, 10), (8.0, 10), (7.0, 15.0), (6.5, 17.5), (6.0, 20.0), (5.25, 27.5), (4.9, None)]
)
def test_a_loss_is_reached_on_the_line_between_validations(loss: float, step: float | None) -> None:
    assert reached(DDP, loss) == step


def test_the_first_time_counts() -> None:
    assert reached([(1, 5.0, 1.0), (2, 3.0, 2.0), (3, 6.0, 3.0), (4, 2.0, 4.0)], 4.0) == 1.5


def test_table_by_hand() -> None:
    rows = {row["method"]: row for row in outcome().rows()}
    assert len({tuple(row) for row in rows.values()}) == 1  # the same columns
    ddp, dgc, int8, onebit_adam, free = rows.values()
    assert (ddp["wall s"], ddp["DDP's loss at step"], ddp["after s"], ddp["/ free"]) == (300.0, 30.0, 300.0, 10.0)
    assert (dgc["final loss"], dgc["/ DDP's"], dgc["s a step"], dgc["wall s"]) == (4.0, 0.8, 1.5, 45.0)
    assert (dgc["DDP's loss at step"], dgc["after s"]) == (18.0, 27.0)
    assert dgc["/ free"] == 0.9  # in the rounds: 27 / 30, 27 / 60, 27 / 30
    assert int8["DDP's loss at step"] == "never: 2 % above" and int8["/ free"] == ""
    assert int8["/ DDP's"] == pytest.approx(1.02)
    assert onebit_adam["wall s"] == 5 * 10.0 + 25 * 1.0 and onebit_adam["after s"] == 5 * 10.0 + 13 * 1.0
    assert [row["steps"] for row in rows.values()] == [30] * 5
    assert (free["method"], free["s a step"], free["wall s"]) == ("no communication", 1.0, 30.0)


def test_a_method_may_train_for_more_steps_than_ddp() -> None:
    _, row, free = outcome(curves={"ddp": DDP, "dgc": LONGER}).rows()
    assert (row["steps"], row["wall s"], row["s a step"], row["/ DDP's"]) == (33, 49.5, 1.5, 0.8)
    assert (row["DDP's loss at step"], row["after s"]) == (27.5, 41.25)
    assert row["/ free"] == 41.25 / 30 and free["steps"] == 30


def test_goals_by_hand() -> None:
    goals = outcome().goals()
    assert [(goal.name.split(",")[0], goal.value, goal.met) for goal in goals] == [
        ("dgc", 0.9, True),
        ("dgc", 0.8, True),
        ("int8", pytest.approx(1.02), False),
    ]
    slow = outcome(seconds={"": [1.0], "ddp": [10.0], "dgc": [2.2]}).goals()
    assert (slow[0].value, slow[0].met) == (pytest.approx(1.32), False)


def test_on_the_real_link_the_times_are_the_curves_own() -> None:
    real = outcome(real=True, seconds={"": [1.0, 3.0]})
    rows = {row["method"]: row for row in real.rows()}
    assert rows["ddp"]["wall s"] == 300.0 and rows["dgc"]["wall s"] == 33.0
    assert rows["dgc"]["after s"] == pytest.approx(19.8)  # step 18, between 11 s at 10 and 22 s at 20
    assert rows["dgc"]["/ free"] == pytest.approx((19.8 / 30 + 19.8 / 90) / 2)
    assert real.walls("ddp", 5) == [50.0, 50.0]


def test_the_plot_is_an_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome().draw(tmp_path / "plot.svg")
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")
