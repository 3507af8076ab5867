"""A pipeline against data parallelism over a real link, and the row of given times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import environment
from support.network import left_behind, namespaces, needs_cluster

from scripts.bench import stages as bench
from scripts.bench.harness import Rounds


@needs_cluster
@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    before, file = namespaces(), tmp_path / "out.json"
    command = [sys.executable, "-m", "scripts.bench.stages", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["link"] == "100 Mbit/s" and row["1f1b to ddp"] < 0.5  # a pipeline sends a hundredth
    assert list(tmp_path.iterdir()) == [file] and not left_behind(before)


def test_what_a_row_says() -> None:
    seconds = {"ddp": [1.0, 4.0, 2.0], "1f1b": [0.5, 1.0, 4.0]}
    row = bench.row("slow", Rounds({name: [{"seconds": each} for each in own] for name, own in seconds.items()}))
    assert row["link"] == "slow" and row["ddp, ms a step"] == 2000.0 and row["1f1b, ms a step"] == 1000.0
    assert (row["1f1b to ddp"], row["least"], row["most"]) == (0.5, 0.25, 2.0)
