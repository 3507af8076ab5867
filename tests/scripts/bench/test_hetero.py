"""Ranks that are held to unequal speeds: the runs of a round, tiny, and the table of given speeds."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import environment
from support.ranks import run_ranks

from scripts.bench import hetero as bench
from trainer.process.environment import Place


def tiny(place: Place) -> list[float]:
    """The ranks sleep, so nothing of the machine is changed."""
    own, *_, last = (replace(case, tokens=2, width=4) for case in bench.cases(14))
    return [
        bench.train(Place(), replace(own, batch=4), place.rank, None),
        bench.train(place, replace(last, batch=24), place.rank, None),
    ]


def test_a_run_alone_and_one_of_three_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "SLEEP_S", 0.0001)
    for speeds in run_ranks(3, tiny):
        assert len(speeds) == 2 and min(speeds) > 0
    (file,) = tmp_path.glob("runs/*/splits.jsonl")
    shares = [json.loads(line)["shares"] for line in file.read_text().splitlines()]
    assert all(sum(each) == 24 for each in shares) and len(shares) == 1 + 14 // 2


def test_what_a_table_says() -> None:
    speeds = {
        "own": [[1.0, 2.0, 5.0], [2.0, 4.0, 10.0]],
        "own, later": [[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]],
        "even shares": [[3.0] * 3, [6.0] * 3],
        "hetero_batch": [[7.6] * 3, [15.2] * 3],
        "hetero_batch, one rank slows down": [[4.5] * 3, [9.0] * 3],
    }
    rows, goals = bench.table(speeds, "control groups")
    assert [row["of their sum"] for row in rows] == pytest.approx([0.375, 0.95, 0.9])
    assert [goal.met for goal in goals] == [True, False]


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "scripts.bench.hetero", "--quick", "--json", file]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(file.read_text())["rows"]) == 4
    assert list(tmp_path.iterdir()) == [file]
