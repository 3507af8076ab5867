"""Each way saves, its turns are told apart, and the table has what the goals are about."""

from pathlib import Path

import pytest

from scripts.bench import checkpoint as bench
from scripts.bench.harness import Rounds

PEERS = {"torch.save", "DCP"}  # asynchronous DCP wants a process group


@pytest.fixture(autouse=True)
def small_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "WIDTH", 16)
    ways = {name: way for name, way in bench.WAYS.items() if name in {"copy", "nothing", "Echelon", *PEERS}}
    monkeypatch.setattr(bench, "WAYS", ways)


def test_each_way_has_a_row(tmp_path: Path) -> None:
    rows, goals = bench.measure("100MB", threads=1, rounds=2)
    assert [row["way"] for row in rows] == ["copy", "nothing", "Echelon", "torch.save", "DCP"]
    assert rows[0]["stall / copy"] == 1 and all((row["stall s"] > 0) == (row["way"] != "nothing") for row in rows)
    assert all(row["durable after s"] >= row["stall s"] for row in rows[2:])
    assert len(goals) == 2 and list(tmp_path.iterdir()) == []  # it leaves nothing


def test_what_a_table_says() -> None:
    """Of 2 rounds after one to make buffers, of a way whose stall is twice and four times a copy's."""

    def turn(stall_s: float, worst: float = 1.0) -> dict[str, float]:
        return {"stall_s": stall_s, "durable_s": 1.0, "median": 1.0, "worst": worst, "step_s": 0.1}

    turns = {"copy": [turn(9), turn(1), turn(2)], "Echelon": [turn(30), turn(2, 1.5), turn(8, 1.3)]}
    turns["nothing"] = [turn(0), turn(0, 1.2), turn(0, 1.3)]
    rows, goals = bench.table(Rounds({**turns}), "100MB", 1)
    assert rows[1]["stall / copy"] == 3 and rows[1]["first stall / copy"] == 20 and rows[1]["worst step"] == 1.4
    assert [(goal.value, goal.met) for goal in goals] == [(3, False), (pytest.approx(1.125), False)]
