"""Turns of rows, some of which fail, and a run over a slow link."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.network import left_behind, namespaces, needs_cluster

from scripts.bench.comm.__main__ import take_turn
from scripts.bench.comm.rows import BASES
from scripts.bench.comm.table import Config, Result
from scripts.bench.harness import Failed


class Fallible:
    """Stands for the ranks: each turn of bf16 but the first fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def turn(self, model: str, name: str, *_: Any) -> dict[str, float]:
        self.asked.append(name)
        if self.asked.count("bf16") == 2 and name == "bf16":
            raise Failed("rank 1: ended with code -11")
        return {"seconds": 1.0, "cpu": 0.5, "busy": 1.0, "sent": 1.0}


def test_a_row_that_fails_is_told_and_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    ranks: Any = Fallible()
    names, config = [*BASES, "bf16"], Config(2, "10M", "1gbit")
    run = Result(config, {name: [] for name in names}, {})
    run.run(3, partial(take_turn, ranks, config, 1.0), f"{config}, ")
    assert ranks.asked == [*names, *names[::-1], *BASES]  # by turns, and turned round; no third turn for bf16
    whole = run.whole()
    assert whole is not None and [row["row"] for row in whole.rows()] == [*BASES]
    assert {len(turns) for turns in whole.turns.values()} == {3}
    assert run.failed == {"bf16": "rank 1: ended with code -11"}
    assert "10M, 2 hosts, 1gbit, round 2/3: bf16: failed: rank 1: ended" in capsys.readouterr().err


@needs_cluster
@pytest.mark.slow
def test_a_turn_of_few_rows(tmp_path: Path) -> None:
    """Over 1 Gbit/s: all rows are there, and sent what they should; a row that dies is told, and the others are not."""
    before, file = namespaces(), tmp_path / "out.json"
    command = [sys.executable, "-m", "scripts.bench.comm", "--hosts", "2", "--model", "10M", "--rate", "1gbit"]
    names = ["bf16", "int8", "topk", "sign", "powersgd-1", "overlap+bf16"]
    command += ["--rows", ",".join(names), "--rounds", "1", "--seconds", "0.1", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    rows = {row["row"]: row for row in written["rows"]}
    assert rows.keys() == {*BASES, *names}
    for name in (*BASES[1:], *names):
        assert abs(rows[name]["off by %"]) < 3, name
    assert rows["all-reduce-alone"]["steps/s"] < 125e6 / 40.6e6 * 1.1  # as slow as the link
    assert rows["no-communication"]["MB sent"] < 0.01
    assert any("bytes, off the formula" in goal["name"] for goal in written["goals"])
    assert not [path for path in tmp_path.iterdir() if path != file], "left files where it was started"
    assert not left_behind(before)
