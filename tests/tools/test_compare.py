"""Runs side by side in the terminal: a row for each, with changed keys, last and best values; the same as JSON."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import environment
from support.messages import refuses
from support.run_files import HOSTILE, hostile_run, synthetic_run, write_lines

from trainer.tools.compare import compare, compare_jobs


def shown(capsys, monkeypatch, columns: int, *folders: Path, everything: bool = False) -> list[str]:
    """Return the lines but for the last, which is a command, and so is not cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert compare(list(folders), False, everything) == 0
    lines = capsys.readouterr().out.splitlines()
    command = shlex.split(lines.pop())
    assert command[:3] == ["curves:", "echelon", "report"] and sorted(command[3:]) == sorted(map(str, folders))
    return lines


def two(tmp_path: Path) -> list[Path]:
    """Two runs whose numbers are known."""
    for name, lr, losses in (("a", 0.1, [3.0, 1.0, 2.0]), ("b", 0.2, [3.0, 2.5, None])):
        lines = [{"step": n, "seconds": n / 2, "val/loss": loss, "mine": 1} for n, loss in enumerate(losses, 1)]
        write_lines(tmp_path / name / "metrics.jsonl", lines)
        (tmp_path / name / "config.yaml").write_text(f"{{batch: 8, optimizer: {{lr: {lr}}}}}")
    return [tmp_path / "a", tmp_path / "b"]


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of all lines; cells are two spaces apart."""
    return [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()]


def test_a_row_for_each_run_the_best_first(tmp_path, capsys, monkeypatch):
    rows = rows_of(shown(capsys, monkeypatch, 200, *reversed(two(tmp_path))))
    assert rows == [
        ["run", "best val/loss", "optimizer.lr", "at step", "state", "steps", "time", "val/loss"],
        ["1 a", "1", "0.1", "2", "running or killed", "3", "1.5 s", "2"],
        ["2 b", "2.5", "0.2", "2", "running or killed", "3", "1.5 s", "not finite"],
        *([f"{name}: {file}: is missing"] for name in "ab" for file in ("summary.json", "events.jsonl")),
        ["b: val/loss: 1 of 3 values are not finite"],
        ["best: a, val/loss 1 at step 2"],
    ]
    rows = rows_of(shown(capsys, monkeypatch, 200, *two(tmp_path), everything=True))
    assert rows[0][-2:] == ["val/loss", "mine"] and rows[1][-2:] == ["2", "1"]


def test_without_a_loss_another_metric_of_the_validation_decides(tmp_path, capsys, monkeypatch):
    """The training loss would choose another run."""
    folders = two(tmp_path)
    for folder, loss, error in zip(folders, (1.0, 2.0), (0.4, 0.3), strict=True):
        write_lines(folder / "metrics.jsonl", [{"step": 1, "train/loss": loss, "val/count": loss, "val/mse": error}])
    lines = shown(capsys, monkeypatch, 200, *folders)
    rows = rows_of(lines)
    assert [row[0] for row in rows[1:3]] == ["1 b", "2 a"] and lines[-1] == "best: b, val/mse 0.3 at step 1"
    assert rows[0][1:4] == ["best val/mse", "optimizer.lr", "at step"]
    assert rows[0][-3:] == ["val/count", "val/mse", "train/loss"]
    assert compare(folders, False, False, by="train/loss") == 0
    assert "best: a, train/loss 1 at step 1" in capsys.readouterr().out
    assert compare(folders, False, False, by="max train/loss") == 0
    assert "best: b, train/loss 2 at step 1" in capsys.readouterr().out
    write_lines(folders[0] / "metrics.jsonl", [{"step": 1, "perf/samples_per_s": 200.0, "x": 1.0}])
    write_lines(folders[1] / "metrics.jsonl", [{"step": 1, "perf/samples_per_s": 100.0, "x": 2.0}])
    assert compare(folders, False, False, by="perf/samples_per_s") == 0
    assert "best: a, perf/samples_per_s 200 at step 1" in capsys.readouterr().out
    with refuses("--by=x", "'max x'", "'min x'"):
        compare(folders, False, False, by="x")
    assert compare(folders, False, False, by="min x") == 0
    assert "best: a, x 1 at step 1" in capsys.readouterr().out
    assert compare(folders, True, False, by="max x") == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["b", "a"]
    write_lines(folders[0] / "metrics.jsonl", [{"step": 1, "val/mse": 1.0}])
    with refuses("--by=val/mae", "val/mse"):
        compare(folders, False, False, by="val/mae")


def test_a_row_of_a_sweep_shows_its_keys_and_its_best_value_at_80_columns(tmp_path, capsys, monkeypatch):
    names = [f"table-lr-{lr}-width-{width}-20261130-081604" for lr in (0.001, 0.01) for width in (16, 64)]
    for n, name in enumerate(names):
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": 3, "val/loss": 0.5 + n}])
        _, _, lr, _, width, *_ = name.split("-")
        (tmp_path / name / "config.yaml").write_text(f"{{optimizer: {{lr: {lr}}}, recipe: {{width: {width}}}}}")
    lines = shown(capsys, monkeypatch, 80, *(tmp_path / name for name in names))
    rows = rows_of(lines)
    assert rows[0][:4] == ["run", "best val/loss", "optimizer.lr", "recipe.width"]
    assert rows[1][:4] == ["1 lr-0.001-width-16", "0.5", "0.001", "16"]
    assert f"best: {names[0]}, val/loss 0.5 at step 3" in lines
    assert compare([tmp_path / name for name in names], True, False) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == names


def test_one_run_is_a_list(tmp_path, capsys, monkeypatch):
    rows = rows_of(shown(capsys, monkeypatch, 80, two(tmp_path)[0]))
    assert rows[0] == ["run", "a"] and ["best val/loss", "1"] in rows and ["val/loss", "2"] in rows


def test_what_a_run_watches_decides(tmp_path, capsys, monkeypatch):
    folders = two(tmp_path)
    for folder, score in zip(folders, (0.5, 0.75), strict=True):
        write_lines(folder / "metrics.jsonl", [{"step": 1, "val/loss": score, "val/f1": score}])
        (folder / "summary.json").write_text('{"stopped": "max_steps", "best": {"metric": "max val/f1"}}')
    rows = rows_of(shown(capsys, monkeypatch, 200, *folders))
    assert [(row[0], row[4]) for row in rows[1:3]] == [("1 b", "finished"), ("2 a", "finished")]
    assert rows[0][1:4] == ["best val/f1", "optimizer.lr", "at step"]


def test_a_job_of_a_sweep_that_made_no_run_has_a_row(tmp_path, capsys, monkeypatch):
    """One finished, one was refused before it had a folder, and one crashed before its config was stored."""
    monkeypatch.setenv("COLUMNS", "200")
    finished, refused, crashed, old, cut = (tmp_path / name for name in ("f", "r", "c", "o", "k"))
    write_lines(finished / "metrics.jsonl", [{"step": 1, "val/loss": 1.0}])
    (finished / "config.yaml").write_text("{batch: 8}")
    (finished / "summary.json").write_text('{"stopped": "max_steps"}')
    (crashed / "logs").mkdir(parents=True)
    (crashed / "summary.json").write_text('{"stopped": "error", "error": "no memory", "steps": 0}')
    write_lines(old / "metrics.jsonl", [{"step": 1, "val/loss": 0.1}])  # of an earlier run
    (old / "summary.json").write_text('{"stopped": "max_steps"}')
    jobs = [(refused, {"batch": 0}, 78, False), (crashed, {"batch": 999}, 1, True), (old, {"batch": 1}, 78, False)]
    assert compare_jobs([*jobs, (finished, {"batch": 8}, 0, True), (cut, {"batch": 2}, 130, False)]) == 0
    rows = rows_of(capsys.readouterr().out.splitlines())
    assert rows[1][:5] == ["1 f", "1", "8", "1", "finished"]
    assert [row[:4] for row in rows[2:6]] == [
        ["2 r", "0", "refused", "0"], ["3 c", "999", "crashed", "0"], ["4 o", "1", "refused", "0"],
        ["5 k", "2", "stopped by a signal", "0"],
    ]  # fmt: skip
    assert ["c: crashed: no memory"] in rows and rows[-1] == [f"curves: echelon report {finished}"]


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


def test_a_run_that_goes_on_is_sorted_as_the_finished_one(tmp_path, capsys, monkeypatch):
    """It has no best value yet. A damaged one is no value."""
    folders = two(tmp_path)
    for folder, score in zip(folders, (100.0, 200.0), strict=True):
        write_lines(folder / "metrics.jsonl", [{"step": 1, "val/x": score}])
    (folders[0] / "summary.json").write_text('{"stopped": "max_steps", "best": {"metric": "max val/x"}}')
    assert shown(capsys, monkeypatch, 200, *folders)[-1] == "best: b, val/x 200 at step 1"
    (folders[1] / "summary.json").write_text('{"stopped": "max_steps", "best": {"step": 1}}')
    assert shown(capsys, monkeypatch, 200, *folders)[-1] == "best: b, val/x 200 at step 1"
