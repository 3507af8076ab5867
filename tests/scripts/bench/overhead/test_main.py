"""The printed and the written result of a short run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import environment

MACHINE = {"cpu", "cores", "load", "system", "date", "commit", "python", "torch"}


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "scripts.bench.overhead", "--quick", "--rounds", "1", "--json", file]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    written = json.loads(file.read_text())
    assert written["machine"].keys() >= MACHINE
    names = [row.get("loop") or row["process"] for row in written["rows"]]
    assert {"bare loop", "Echelon", "Echelon, default observers", "Echelon, step_timer", "bare DDP", "--help"} <= set(
        names
    )
    assert all(row["ratio"] > 0 for row in written["rows"])
    assert len(written["goals"]) == 6
    lines = result.stdout.splitlines()[-6:]
    for goal, line in zip(written["goals"], lines, strict=True):
        assert line.startswith(f"- {goal['name']}: {goal['goal']}, measured ")
        assert line.endswith(", met" if goal["met"] else ", missed")
    assert not [path for path in tmp_path.iterdir() if path != file], "left files where it was started"
