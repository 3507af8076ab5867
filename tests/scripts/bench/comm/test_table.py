"""Tables and goals of made-up turns."""

from typing import Any

import pytest

from scripts.bench.comm.table import Config, Result


def turns(*seconds: float, sent: float = 0.0) -> list[dict[str, float]]:
    return [{"seconds": each, "cpu": each / 2, "busy": each * 1.25, "sent": sent} for each in seconds]


def result(**changed: Any) -> Result:
    """One median round, one twice as slow, and one in which only bare DDP is slow. P is 10,142,272."""
    plain = 4.0 * 10_142_272
    seconds = {
        "no-communication": turns(1.0, 2.0, 1.0),
        "all-reduce-alone": turns(1.5, 3.0, 1.5, sent=plain),
        "ddp-25": turns(3.0, 6.0, 9.0, sent=plain),
        "ddp-one": turns(2.0, 4.0, 9.0, sent=plain),
        "torch-fp16": turns(1.6, 3.2, 1.6, sent=plain / 2),
        "overlap": turns(1.8, 3.6, 1.8, sent=plain * 1.02),
        "fp16": turns(1.2, 2.4, 1.2, sent=plain / 2),
        "topk": turns(1.25, 2.5, 1.25, sent=(0.04 + 1 / 16384) * 10_142_272),
    }
    return Result(Config(2, "10M", "100mbit"), {**seconds, **changed}, {})


def test_the_table_compares_within_rounds() -> None:
    table = {row["row"]: row for row in result().rows()}
    assert len({tuple(row) for row in table.values()}) == 1  # the same columns
    overlap = table["overlap"]
    assert overlap["part"] == "10M, 2 hosts, 100mbit; 3 rounds; speed-up over ddp-one"
    assert overlap["steps/s"] == pytest.approx(1 / 1.8)
    assert overlap["speed-up"] == pytest.approx(2 / 1.8)
    assert overlap["time / exact limit"] == pytest.approx(1.2)
    assert overlap["of no communication"] == pytest.approx(1 / 1.8)
    assert overlap["max / min"] == pytest.approx(2)
    assert overlap["cores used by others"] == pytest.approx(0.25)
    assert overlap["formula"] == pytest.approx(40.569088)
    assert overlap["off by %"] == pytest.approx(2)
    assert table["no-communication"]["formula"] == ""


def test_goals_are_met_or_missed() -> None:
    goals = [
        (goal.name.removeprefix("10M, 2 hosts, 100mbit: "), round(goal.value, 3), goal.met) for goal in result().goals()
    ]
    assert goals == [
        ("overlap, times the exact limit (communication is 1.50 of compute)", 1.2, False),
        ("bytes, off the formula by percent, worst of all (overlap)", 2.0, True),
        ("fp16, of the speed without communication", 0.833, False),
        ("topk, of the speed without communication", 0.8, False),
        ("fp16, times torch-fp16", 0.75, True),
    ]


def test_overlap_has_no_goal_where_there_is_little_to_hide() -> None:
    quick = result(**{"all-reduce-alone": turns(0.4, 0.8, 0.4)})
    assert not [goal for goal in quick.goals() if "exact limit" in goal.name]


def test_what_was_cut_short_is_left_out() -> None:
    cut = result(overlap=turns(1.8)).whole()
    assert cut is not None and {len(each) for each in cut.turns.values()} == {1}
    assert result(overlap=[]).whole() is None
    failed = result()
    del failed.turns["all-reduce-alone"]
    assert failed.whole() is None
