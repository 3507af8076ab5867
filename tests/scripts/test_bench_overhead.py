"""scripts/bench_overhead.py: that loops by turns are timed right, and what the script prints and writes."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MACHINE = {"cpu", "cores", "load", "system", "date", "commit", "python", "torch"}


def sleeper(seconds: float):
    def train(task, batches, steps, folder) -> None:
        for _ in batches:
            time.sleep(seconds)

    return train


def test_loops_by_turns_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from overhead_loops import MLP
    from overhead_turns import measure

    began = time.perf_counter()
    runs = measure({"fast": sleeper(0.001), "slow": sleeper(0.003)}, MLP, rounds=4, warm=10)
    elapsed_us = (time.perf_counter() - began) * 1e6
    for name, sleep_us in (("fast", 1000), ("slow", 3000)):
        assert len(runs[name].wall_us) == len(runs[name].cpu_us) == 4
        assert min(runs[name].wall_us) > sleep_us
        assert min(runs[name].cpu_us) < sleep_us  # sleeping is no work
    assert sum(run.timed * sum(run.wall_us) for run in runs.values()) < elapsed_us  # no turn is counted twice


def test_on_a_device_a_turn_ends_when_the_device_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import overhead_loops
    import overhead_turns
    import torch

    task = dataclasses.replace(overhead_loops.MLP, device=torch.device("meta"))
    seen, waits = set[str](), list[int]()

    def notes(task, batches, steps, folder) -> None:
        model, _ = task.build()
        for taken, (x, y) in enumerate(task.upload(batches)):
            seen.update(tensor.device.type for tensor in (x, y, *model.parameters()))
            progress[0] = taken + 1

    def wait(device: torch.device) -> None:
        waits.append(progress[0])
        time.sleep(0.01)

    progress = [0]
    monkeypatch.setattr(overhead_turns, "wait", wait)
    runs = overhead_turns.measure({"loop": notes}, task, rounds=2, warm=10)
    assert seen == {"meta"} and waits == [10, 50, 60, 100]
    assert min(runs["loop"].wall_us) > 0.01 / 40 * 1e6 > max(runs["loop"].cpu_us)


def test_two_ranks_are_on_two_gpus_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_overhead
    import torch

    for gpus, alone, second in ((0, "cpu", "cpu"), (1, "cuda:0", "cpu"), (2, "cuda:0", "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [str(bench_overhead.device()), str(bench_overhead.device(1, 2))] == [alone, second]


def test_a_loop_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from overhead_loops import MLP
    from overhead_turns import measure

    def fail(task, batches, steps, folder) -> None:
        next(iter(batches))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure({"fails": fail, "fast": sleeper(0.0)}, MLP, rounds=2, warm=10)


@pytest.mark.parametrize(("value", "met"), [(1.1, True), (1.11, False)])
def test_a_goal_is_met_or_missed(value: float, met: bool, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from bench_report import at_most, report

    rows = [{"part": "a table", "loop": "bare", "ratio": 1.0}]
    report([rows], [at_most("a ratio", 1.1, value)], {"cpu": "x"}, tmp_path / "out.json")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"- a ratio: at most 1.1, measured {value}, {'met' if met else 'missed'}"
    goal = {"name": "a ratio", "goal": "at most 1.1", "value": value, "met": met}
    assert json.loads((tmp_path / "out.json").read_text()) == {"machine": {"cpu": "x"}, "rows": rows, "goals": [goal]}


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, SCRIPTS / "bench_overhead.py", "--quick", "--rounds", "1", "--json", file]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    written = json.loads(file.read_text())
    assert written["machine"].keys() >= MACHINE
    names = [row.get("loop") or row["process"] for row in written["rows"]]
    assert {"bare loop", "Echelon", "Echelon, default observers", "bare DDP", "--help"} <= set(names)
    assert all(row["ratio"] > 0 for row in written["rows"])
    assert len(written["goals"]) == 5
    lines = result.stdout.splitlines()[-5:]
    for goal, line in zip(written["goals"], lines, strict=True):
        assert line.startswith(f"- {goal['name']}: {goal['goal']}, measured ")
        assert line.endswith(", met" if goal["met"] else ", missed")
    assert not [path for path in tmp_path.iterdir() if path != file], "left files where it was started"
