"""The command: cells without packages or time are listed, and the table is written."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.cli import ROOT, environment

from scripts.bench.bert import bench
from scripts.bench.bert.cells import Cell, matrix
from scripts.bench.bert.process import Outcome
from trainer.errors import ConfigError

LATE = Outcome({}, "not run: the time was over")


def test_the_first_cells_are_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("speed", "Echelon"), Cell("speed", "Lightning"), Cell("speed", "bare loop")]
    limits = []

    def run_cell(cell: Cell, limit_s: float) -> Outcome:
        limits.append(limit_s)
        return Outcome({"tokens/s": 1.0})

    monkeypatch.setattr(bench, "run_cell", run_cell)
    monkeypatch.setattr(bench, "missing", lambda cell: "needs lightning" if cell.trainer == "Lightning" else "")
    outcomes = dict.fromkeys(cells, LATE)
    bench.run_all(outcomes, time.monotonic() + 100)
    assert [outcome.reason for outcome in outcomes.values()] == ["", "not run: needs lightning", ""]
    assert all(90 < limit <= 100 for limit in limits)
    outcomes = dict.fromkeys(cells, LATE)
    bench.run_all(outcomes, time.monotonic() + 10)
    assert [outcome.reason for outcome in outcomes.values()] == [LATE.reason, "not run: needs lightning", LATE.reason]


def test_the_table_has_numbers_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell, other = Cell("speed", "Echelon"), Cell("speed", "Echelon", precision="fp8")
    found = {"ms a step": 2.0, "tokens/s": 12345.0, "peak GiB": 1.5}
    bench.finish({cell: Outcome(found), other: Outcome({}, "Traceback\nrefused: why")}, None, tmp_path)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert file.name.endswith(time.strftime("-%Y-%m-%d.md")) and text in f"# BERT-large on one GPU\n\n{text}"
    assert "12,345" in text and "- speed, Echelon, sequence 512, micro_batch 64, fp8: refused: why\n" in text
    assert f"torch {torch.__version__}" in text and "12,345" in capsys.readouterr().out


def test_one_cell_of_each_kind() -> None:
    few = bench.one_of_each(matrix(80.0))
    assert len(few) < len(matrix(80.0)) / 2 and {cell.part for cell in few} == {cell.part for cell in matrix(80.0)}
    assert {cell.precision for cell in few} == {"bf16", "bf16_params", "fp8"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_whole_bench_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(ConfigError, match="no GPU here; --quick"):
        bench.main()


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        bench.options().parse_args(["--out", str(tmp_path / "missing")])
    assert "make it first" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    """As a script of a checkout that is not installed."""
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "gpu.py"), "--quick", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    (file,) = tmp_path.iterdir()
    assert file.read_text().count("| Echelon ") >= 4
