"""Trainings that fail, a second run that trains the missing curves, and a tiny run."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.cli import environment
from support.messages import refuses
from support.network import left_behind, namespaces, needs_cluster

from scripts.bench.harness import Failed
from scripts.bench.loss import __main__ as bench
from scripts.bench.loss.__main__ import Settings, run
from scripts.bench.loss.rank import CURVE


class Fake:
    """Stands for the ranks: the curve of a method is told from its name; bf16 fails in training, int8 when timed."""

    asked: list[tuple[str, str]] = []

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked.clear()

    def turn(self, model: str, row: str, rate: str, steps: int, *_: Any) -> dict[str, float]:
        self.asked.append((row, rate))
        if row in ("train bf16", "time int8"):
            raise Failed("rank 1: ended with code -11")
        if row.startswith("train"):
            (self.folder / CURVE).write_text(json.dumps([[steps, len(row), 1.0]]))
        return {"seconds": 0.5, "sent": 0.0}


def test_a_second_run_trains_what_is_missing_and_a_failure_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ranks_in", lambda *_: nullcontext(Fake(tmp_path)))
    file, settings, names = tmp_path / "out.json", Settings("tiny", 7, False), ["ddp", "bf16", "int8"]
    found = run(settings, names, 2, settings.record(file))
    slow, free = "100mbit", "unlimited"
    assert Fake.asked == [
        ("train ddp", free), ("train bf16", free), ("train int8", free),
        ("time ", slow), ("time ddp", slow), ("time int8", slow), ("time ddp", slow), ("time ", slow),
    ]  # fmt: skip
    assert {name: found.values(name) for name in found.turns} == {"": [0.5, 0.5], "ddp": [0.5, 0.5]}
    assert list(found.failed) == ["bf16", "int8"]
    again = settings.record(file)
    assert again["curves"] == {"ddp": [[7, 9, 1.0]], "int8": [[7, 10, 1.0]]}
    run(settings, [*names, "dgc", "overlap+powersgd-longer"], 1, again)
    trained = ["train bf16", "train dgc", "train overlap+powersgd-longer"]
    assert [row for row, _ in Fake.asked if row.startswith("train")] == trained
    assert again["curves"]["dgc"][-1][0] == 7 and again["curves"]["overlap+powersgd-longer"][-1][0] == 8  # 7.7
    with refuses(f"--json {file}", "'steps': 7", "'steps': 8"):
        Settings("tiny", 8, False).record(file)


@needs_cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tiny_run(tmp_path: Path) -> None:
    before, file, svg = namespaces(), tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, "-m", "scripts.bench.loss", "--model", "tiny", "--steps", "16", "--rounds", "1"]
    command += ["--methods", "local_sgd+int8", "--json", str(file), "--svg", str(svg)]
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["curves"].keys() == {"ddp", "local_sgd+int8"} and written["failures"] == []
    for curve in written["curves"].values():
        steps, losses, seconds = zip(*curve)
        assert list(steps) == list(range(1, 17)) and list(seconds) == sorted(seconds) and seconds[0] > 0
        assert abs(losses[0] - 7.6) < 0.5 and losses[-1] < losses[0] - 0.1  # ln 2048 is 7.62: nothing is known at first
    rows = {row["method"]: row for row in written["rows"]}
    assert rows["ddp"]["s a step"] > 1.5 * 4 * 686_000 / 12.5e6  # as slow as the link
    assert rows["no communication"]["wall s"] < rows["local_sgd+int8"]["wall s"] < rows["ddp"]["wall s"]
    assert rows["ddp"]["/ DDP's"] == 1.0 and len(written["goals"]) == 1
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "out.svg", "cache"}
    assert not left_behind(before)
