"""The command: order and limits of parts, cells without numbers, files that are whole after each cell."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import ROOT, environment
from support.messages import refuses
from support.needs import needs

from scripts.bench.harness import Failed, Report
from scripts.bench.one_gpu import run
from scripts.bench.one_gpu.cells import Cell, Part, ladder, parts

NUMBERS = {"ms a step": 2.0, "tokens/s": 12345.0, "peak GiB": 1.5}


class Fakes:
    """Cells that take fake seconds and measure nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: dict[str, float]) -> None:
        self.now, self.seconds, self.limits = 1000.0, seconds, list[tuple[str, float]]()
        monkeypatch.setattr(run, "alone", self.alone)
        monkeypatch.setattr(run, "missing", lambda packages: "needs lightning" if packages == ("lightning",) else "")
        monkeypatch.setattr(run.time, "monotonic", lambda: self.now)
        self.results = run.Results(folder, Report(None, None))

    def alone(self, function: Any, cell: Cell, folder: str, limit_s: float, fork: bool) -> dict[str, float]:
        assert Path(folder).is_dir() and not fork
        took = self.seconds.get(cell.trainer, 10.0)
        self.now += min(took, limit_s)
        self.limits.append((cell.trainer, limit_s))
        if took > limit_s:
            raise Failed(f"no result in {limit_s:.0f} s")
        return NUMBERS


def cells(*trainers: str) -> list[Cell]:
    return [Cell("speed", trainer) for trainer in trainers]


def lines(results: run.Results) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.file.with_suffix(".jsonl").read_text().splitlines()]


def test_a_part_has_its_seconds_and_those_that_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes = Fakes(monkeypatch, tmp_path, {"b": 1e9, "c": 1e9})
    plan = [Part("one", 30, cells("a")), Part("two", 40, cells("b", "x")), Part("three", 200, cells("c", "d"))]
    run.run_all(plan, fakes.results)
    # "x" is late in its own part, and comes before the cells of the last one.
    assert fakes.limits == [("a", 30), ("b", 60), ("x", 100), ("c", 100), ("d", 90)]
    assert [(row["part"], row["cell"].split(", ")[1]) for row in lines(fakes.results)] == [
        ("one", "a"), ("two", "b"), ("two", "x"), ("three", "c"), ("three", "d")
    ]  # fmt: skip
    assert set(fakes.results.failed.values()) == {"no result in 60 s", "no result in 100 s"}
    assert fakes.results.seconds == {"one": 10, "two": 70, "three": 110}


def test_cells_without_packages_or_time_have_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes = Fakes(monkeypatch, tmp_path, {"a": 95.0})
    run.run_all([Part("one", 100, cells("a", "b", "Lightning")), Part("two", 5, cells("c"))], fakes.results)
    assert [row["reason"] for row in lines(fakes.results)] == ["", run.LATE, run.LATE, run.LATE]
    again = Fakes(monkeypatch, tmp_path / "..", {})
    again.results.out = tmp_path
    run.run_all([Part("one", 100, cells("Lightning", "a")), Part("two", 9, [])], again.results)
    assert list(again.results.failed.values()) == ["not run: needs lightning"]


def test_a_rung_that_is_measured_already_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    fakes = Fakes(monkeypatch, tmp_path, {"Echelon": 0.0, "bare loop": 0.0})
    plan = [Part(part.name, 1e6, [c for c in part.cells if c.kind == "speed"]) for part in parts(80.0)]
    run.run_all(plan, fakes.results)
    names = [row["cell"] for row in lines(fakes.results)]
    assert len(names) == len(set(names)) and {str(rung.cell) for rung in ladder(64)} <= set(names)


def test_the_files_have_numbers_and_reasons_after_each_cell(tmp_path: Path) -> None:
    results = run.Results(tmp_path, Report(None, None))
    page = results.file.with_suffix(".md")
    first, second = cells("Echelon", "Lightning")
    results.add("bert", first, NUMBERS, "", 2.5)
    assert "12,345" in page.read_text() and "Lightning" not in page.read_text()
    results.add("bert", second, None, "Traceback\nrefused: why", 1.5)
    assert "- speed, Lightning, sequence 512, micro_batch 64, bf16: refused: why\n" in page.read_text()
    assert "| bert | 4.000 |" in page.read_text() and results.file.name.startswith(time.strftime("cpu-%Y-"))
    assert [row["numbers"] for row in lines(results)] == [NUMBERS, None]


def test_a_kill_leaves_the_finished_cells(tmp_path: Path) -> None:
    """A killed bench, with real processes: a cell that failed, one that ended, and one that hangs."""
    env = environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(Path(__file__).parent)]))
    bench = subprocess.Popen([sys.executable, "-m", "fakes", str(tmp_path)], env=env, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert bench.poll() is None
        time.sleep(0.02)
    bench.kill()
    bench.wait()
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["reason"].splitlines()[-1:] for row in rows] == [
        [], ["refused: no such thing"], ["the process ended with code 3"]
    ]  # fmt: skip
    page = file.with_suffix(".md").read_text()
    assert "12,345" in page and "refused: no such thing\n" in page and "ended with code 3\n" in page
    while Path("/proc", pid.read_text()).exists():  # pytest's own limit ends this
        time.sleep(0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    monkeypatch.delenv("ECHELON_TEST_DEVICE", raising=False)
    with refuses("scripts/bench/gpu.py", "GPU", "ECHELON_TEST_DEVICE=cpu"):
        run.main()


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        run.options().parse_args(["--out", str(tmp_path / "missing")])
    assert "make it first" in capsys.readouterr().err


@needs("transformers", "lightning", "accelerate")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_cell_in_miniature(tmp_path: Path) -> None:
    """As a script of a checkout that is not installed."""
    env = {key: value for key, value in environment(ECHELON_TEST_DEVICE="cpu").items() if key != "PYTHONPATH"}
    script = [sys.executable, str(ROOT / "scripts" / "bench" / "gpu.py"), "--out", str(tmp_path)]
    done = subprocess.run([*script, "--budget-s", "4000"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["part"] for row in rows} == {part.name for part in parts(0.0)}
    (refused,) = (row for row in rows if row["numbers"] is None)
    assert refused["reason"].startswith("refused: trainer.precision=fp8")
    assert rows[0]["numbers"] == {"passed": 2.0, "skipped": 1.0}
    page = file.with_suffix(".md").read_text()
    assert all(f"| {rung.name} " in page for rung in ladder(16) if rung.cell.precision != "fp8")
