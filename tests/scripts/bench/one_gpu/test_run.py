"""The command: cells without packages or time are listed, and the table is written."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.cli import ROOT, environment
from support.messages import refuses

from scripts.bench.harness import Rounds
from scripts.bench.one_gpu import run as bench
from scripts.bench.one_gpu.cells import Cell, matrix


def test_the_first_cells_are_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("speed", "Echelon"), Cell("speed", "Lightning"), Cell("speed", "bare loop")]
    limits = []

    def alone(function: object, cell: Cell, folder: str, limit_s: float, fork: bool) -> dict[str, float]:
        limits.append(limit_s)
        return {"tokens/s": 1.0}

    monkeypatch.setattr(bench, "alone", alone)
    monkeypatch.setattr(bench, "missing", lambda packages: "needs lightning" if packages == ("lightning",) else "")
    for seconds, late in ((100, {}), (10, {cells[0]: bench.LATE, cells[2]: bench.LATE})):
        found = Rounds.of(cells)
        bench.run_all(found, time.monotonic() + seconds)
        assert found.failed == {cells[1]: "not run: needs lightning", **late}
    assert len(limits) == 2 and all(90 < limit <= 100 for limit in limits)


def test_the_table_has_numbers_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell, other, late = (Cell("speed", "Echelon", precision=precision) for precision in ("bf16", "fp8", "fp32"))
    numbers = {"ms a step": 2.0, "tokens/s": 12345.0, "peak GiB": 1.5}
    found = Rounds({cell: [numbers], late: []}, {other: "Traceback\nrefused: why"})
    with bench.Report(None, ("torch",)) as report:
        bench.finish(found, report, tmp_path)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert file.name.endswith(time.strftime("-%Y-%m-%d.md")) and text.startswith("# BERT-large on one GPU\n\n")
    assert "12,345" in text and "- speed, Echelon, sequence 512, micro_batch 64, fp8: refused: why\n" in text
    assert f"fp32: {bench.LATE}" in text
    assert f"torch {torch.__version__}" in text and "12,345" in capsys.readouterr().out


def test_one_cell_of_each_kind() -> None:
    few = bench.one_of_each(matrix(80.0))
    assert len(few) < len(matrix(80.0)) / 2 and {cell.part for cell in few} == {cell.part for cell in matrix(80.0)}
    assert {cell.precision for cell in few} == {"bf16", "bf16_params", "fp8"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_whole_bench_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with refuses("scripts.bench.gpu", "GPU", "--quick"):
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
