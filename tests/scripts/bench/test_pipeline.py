"""Schedules over slow links: a run of each, tiny, and the table of given times."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.ranks import run_ranks

from scripts.bench import pipeline as bench
from trainer.process.environment import Place

CASES = list(bench.SCHEDULES.values())


def tiny(place: Place) -> list[float]:
    bench.FORWARD_S = bench.BACKWARD_S = 0.0
    return [bench.train(replace(place, store=f"{place.store}-{i}"), case, 2) for i, case in enumerate(CASES)]


@pytest.mark.slow
def test_a_run_of_each_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(seconds > 0 for times in run_ranks(bench.STAGES, tiny) for seconds in times)


def test_what_a_table_says() -> None:
    later = "2bw, run_ahead=2"
    rounds = [{"1f1b": 1.96, "2bw": 1.16, later: 0.96}, {"1f1b": 2.96, "2bw": 1.96, later: 1.96}]
    rows, goals = bench.table({"10 ms": rounds, "20 ms": [{"1f1b": 1.96, "2bw": 1.46, later: 1.06}]})
    assert [row["2bw, waiting"] for row in rows] == pytest.approx([0.35, 0.5])
    assert [row[f"{later}, waiting"] for row in rows] == pytest.approx([0.25, 0.1])
    assert rows[0]["1f1b, ms a step"] == pytest.approx(2460.0)
    assert [goal.met for goal in goals] == [True, True, False, True]
