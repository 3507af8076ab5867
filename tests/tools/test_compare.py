"""Runs side by side in the terminal: changed keys, last and best values, at 80 columns and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import environment
from support.run_files import HOSTILE, hostile_run, synthetic_run, write_lines

from trainer.tools.compare import compare


def shown(capsys, monkeypatch, columns: int, *folders: Path, everything: bool = False) -> list[str]:
    """Return the lines but for the last of several runs: it is a command, and so is not cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert compare(list(folders), False, everything) == 0
    lines = capsys.readouterr().out.splitlines()
    if len(folders) > 1:
        assert lines.pop() == f"curves: echelon report {' '.join(map(str, folders))}"
    return lines


def two(tmp_path: Path) -> list[Path]:
    """Two runs whose numbers are known."""
    for name, lr, losses in (("a", 0.1, [3.0, 1.0, 2.0]), ("b", 0.2, [3.0, 2.5, None])):
        lines = [{"step": n, "seconds": n / 2, "val/loss": loss, "mine": 1} for n, loss in enumerate(losses, 1)]
        write_lines(tmp_path / name / "metrics.jsonl", lines)
        (tmp_path / name / "config.yaml").write_text(f"{{batch: 8, optimizer: {{lr: {lr}}}}}")
    return [tmp_path / "a", tmp_path / "b"]


def test_what_two_runs_show(tmp_path, capsys, monkeypatch):
    lines = [line.split() for line in shown(capsys, monkeypatch, 80, *two(tmp_path)) if line.strip()]
    assert lines[:4] == [
        ["a", "b"],
        ["state", *["running", "or", "killed"] * 2],
        ["steps", "3", "3"],
        ["seconds", "1.5", "1.5"],
    ]
    assert ["optimizer.lr", "0.1", "0.2"] in lines and not any("batch" in line for line in lines)
    place = lines.index(["val/loss", "2", "not", "finite"])
    assert lines[place + 1] == ["1", "@", "2", "2.5", "@", "2"]
    assert not any("mine" in line for line in lines)
    assert lines[-1] == ["b:", "val/loss:", "1", "of", "3", "values", "are", "not", "finite"]
    lines = shown(capsys, monkeypatch, 80, *two(tmp_path), everything=True)
    assert any(line.split() == ["mine", "1", "1"] for line in lines)


def test_json_has_everything(tmp_path, capsys):
    assert compare(two(tmp_path), True, False) == 0
    a, b = json.loads(capsys.readouterr().out)["runs"]
    assert (a["name"], a["changed"], b["changed"]) == ("a", {"optimizer.lr": 0.1}, {"optimizer.lr": 0.2})
    assert a["metrics"]["val/loss"] == {"last": 2.0, "step": 3, "best": 1.0, "best_step": 2}
    assert b["metrics"]["val/loss"] == {"last": None, "step": 3, "best": 2.5, "best_step": 2}
    assert a["metrics"]["mine"]["best"] is None and "summary.json: is missing" in a["missing"]


@pytest.mark.parametrize("columns", [80, 50, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path, capsys, monkeypatch, columns):
    lines = shown(capsys, monkeypatch, columns, *runs_of(tmp_path))
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert all(text.count(f"run-{n}") for n in range(6))


def runs_of(tmp_path: Path) -> list[Path]:
    return [synthetic_run(tmp_path / f"run-{n}", 40, seed=n, lr=1e-3 / (n + 1)) for n in range(6)]


def test_a_strangers_texts_are_texts(tmp_path, capsys, monkeypatch):
    folder = hostile_run(tmp_path / "r")
    write_lines(folder / "metrics.jsonl", [{"step": 1, "val/[red]\x1b[2J": 1.0, f"val/{HOSTILE}": 2.0}])
    text = "".join(shown(capsys, monkeypatch, 200, folder, everything=True))
    assert "[red]?[2J" in text and "\x1b" not in text


def test_a_folder_without_a_run_is_one_line(tmp_path):
    command = [sys.executable, "-m", "trainer.tools.compare", "none"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and done.stderr.count("\n") == 1
    assert done.stderr == "echelon: RUN=none: is no folder; give the folder of a run, as in runs/NAME\n"
