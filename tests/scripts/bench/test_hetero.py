"""Ranks that are held to unequal speeds: the runs of a round, tiny, and the table of given speeds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.ranks import run_ranks

from scripts.bench import hetero as bench
from trainer.process.environment import Place


def tiny(place: Place) -> list[float]:
    own, *_, slows, _ = (replace(case, batch=24, tokens=2, width=4) for case in bench.cases(4))
    limit = bench.Limit()
    return [
        bench.train(Place(), own, place.rank, limit, f"runs/own-{place.rank}"),
        bench.train(place, slows, place.rank, limit, "runs/slows"),
    ]


def test_a_run_alone_and_one_of_three_ranks(tmp_path: Path) -> None:
    for speeds in run_ranks(3, tiny):
        assert len(speeds) == 2 and min(speeds) > 0
    shares = [json.loads(line)["shares"] for line in Path("runs/slows/run/splits.jsonl").read_text().splitlines()]
    steps = bench.cases(4)[-2].steps
    assert all(sum(each) == 24 for each in shares) and len(shares) == 1 + steps // bench.EVERY


def test_a_rank_sleeps_for_the_time_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used, slept = [10.0], list[float]()
    monkeypatch.setattr(bench.time, "process_time", lambda: used[0])
    monkeypatch.setattr(bench.time, "sleep", slept.append)
    limit = bench.Limit()
    limit.hold(0.2)
    used[0] = 11.0
    limit.sleep()
    assert slept == pytest.approx([4.0])


def test_a_slowdown_is_timed_once_the_shares_have_followed() -> None:
    """Two measurements, and the steps that are loaded ahead; even shares settle at once."""
    hetero, even = bench.cases(12)[-2:]
    assert hetero.steps - hetero.timed - (bench.EVERY + 2) == 2 * bench.EVERY + 3
    assert even.steps - even.timed == bench.EVERY + 2 + 2


def test_what_a_table_says() -> None:
    speeds = {
        "own": [[1.0, 2.0, 5.0], [2.0, 4.0, 10.0]],
        "own, later": [[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]],
        "even shares": [[3.0] * 3, [6.0] * 3],
        "hetero_batch": [[7.6] * 3, [15.2] * 3],
        "hetero_batch, one rank slows down": [[4.5] * 3, [9.0] * 3],
    }
    rows, goals = bench.table(speeds)
    assert [row["of their sum"] for row in rows] == pytest.approx([0.375, 0.95, 0.9])
    assert [goal.met for goal in goals] == [True, False]
