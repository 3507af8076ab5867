"""scripts/bench_comm.py: its formulas by hand, its table and goals from made-up turns, and a run over a slow link."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.network import namespaces, needs_cluster

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from bench_comm import failures, measure
from comm_rows import BASES, ROWS
from comm_table import Config, Result
from comm_turns import Failed

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_comm.py"
SHAPES: list[tuple[int, ...]] = [(10, 8), (8,), (4, 3, 2), (2, 2)]  # 80 + 8 + 24 + 4 = 116 elements
# Bytes from each of 4 ranks. Rank 1 of matrices: 18 + 10 numbers, and 8 + 4 as they are, for 2 x 2 is not worth it.
BYTES = {
    "ddp-25": 1.5 * 464,
    "bf16": 1.5 * 232,
    "int8": 1.5 * (116 + 116 / 64),
    "topk": 3 * (4 * 1.16 + 116 / 16384),
    "dgc": 3 * (6 * 0.116 + 116 / 16384),
    "sign": 3 * (14.5 + 16),
    "powersgd-1": 1.5 * 4 * (28 + 12),
    "torch-powersgd-1": 1.5 * 4 * (28 + 12),
    "torch-local_sgd-16": 1.5 * 464 / 16,
    "powersgd-4": 1.5 * 4 * (72 + 8 + 24 + 4),
    "blocksparse": 3 * 116 / 2048 + 1.5 * 464,
    "onebit_adam": 1.5 * (14.5 + 16),
    "overlap+int8": 1.5 * (116 + 116 / 64),
    "local_sgd-16": 1.5 * 464 / 16,
    "diloco-32-delay-16+int8": 1.5 * (116 + 116 / 64) / 32,
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_by_hand(name: str) -> None:
    sends = ROWS[name].sends
    assert sends is not None
    assert sends(SHAPES, 4) == pytest.approx(BYTES[name], rel=1e-12)


def test_every_row_can_be_built() -> None:
    for row in ROWS.values():
        assert row.build().keys() == row.callbacks.keys()
        assert row.warm % row.every == 0 and row.warm > 4


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
    table = {row["row"]: row for row in result().table()}
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
    names = [*BASES, "bf16"]
    run = Result(Config(2, "10M", "1gbit"), {name: [] for name in names}, {})
    measure(ranks, run, 3, 1.0)
    assert ranks.asked == [*names, *names[::-1], *BASES]  # by turns, and turned round; no third turn for bf16
    whole = run.whole()
    assert whole is not None and [row["row"] for row in whole.table()] == [*BASES]
    assert {len(turns) for turns in whole.turns.values()} == {3}
    error = "rank 1: ended with code -11"
    assert failures([run]) == [{"part": "Failed", "table": "10M, 2 hosts, 1gbit", "row": "bf16", "error": error}]
    assert f"10M, 2 hosts, 1gbit, round 2/3: bf16 failed: {error}" in capsys.readouterr().err


def test_a_turn_that_dies_is_told_and_the_next_is_taken() -> None:
    command = [sys.executable, str(SCRIPT.with_name("comm_rank.py"))]
    orders = "".join(json.dumps({"row": row}) + "\n" for row in ("nonsense", "other"))
    done = subprocess.run(command, env=environment(), input=orders, capture_output=True, text=True, timeout=60)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"started": True},
        {"error": "KeyError: 'nonsense'"},
        {"error": "ended with code 1"},
        {"error": "KeyError: 'other'"},
        {"error": "ended with code 1"},
    ]


@needs_cluster
@pytest.mark.slow
def test_a_turn_of_few_rows(tmp_path: Path) -> None:
    """Over 1 Gbit/s: all rows are there, and sent what they should; a row that dies is told, and the others are not."""
    before, file = namespaces(), tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--hosts", "2", "--model", "10M", "--rate", "1gbit"]
    names = ["bf16", "int8", "topk", "sign", "powersgd-1", "overlap+bf16"]
    command += ["--rows", ",".join(names), "--rounds", "1", "--seconds", "0.1", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=110)
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
    assert namespaces() == before
