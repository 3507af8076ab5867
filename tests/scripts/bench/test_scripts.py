"""Each bench that needs no network, in its quick form: its rows are written, and it leaves nothing else."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment

from scripts.bench import sharding
from trainer.comm.codecs.registry import CODECS


def column(name: str) -> Callable[[Any], set[str]]:
    return lambda rows: {row.get(name) for row in rows}


CASES: dict[str, tuple[Callable[[Any], set[str]], set[str], int]] = {  # values of rows that are there; goals
    "activations --quick": (column("activation_checkpoint"), {"plain", "every=2", "selective", "full"}, 0),
    "checkpoint --quick": (column("way"), {"Echelon", "DCP async, process"}, 2),
    "codecs --quick": (column("codec"), set(CODECS), 2),
    "cost_model": (column("row"), {"ddp-25", "overlap"}, 10),
    "data --quick": (column("loader"), {"raw", "Echelon", "webdataset"}, 13),
    "hetero --quick": (column("shares"), {"hetero_batch", "even shares"}, 2),
    "images --quick": (column("loader"), {"Echelon", "Pillow", "decode alone"}, 2),
    "overhead --quick --rounds 1": (
        lambda rows: {row.get("loop") or row["process"] for row in rows},
        {"bare loop", "Echelon", "Echelon, default observers", "Echelon, step_timer", "bare DDP", "--help"}, 6,
    ),
    "published": (column("ranks"), {8, 16, 32}, 0),
    "ranks --quick": (column("part"), {"agreed word of a step", "settings at the start", "checkpoint of parts"}, 0),
    "sharding --quick": (column("callback"), set(sharding.WAYS), 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.parametrize("words", CASES)
def test_the_whole_script(words: str, tmp_path: Path) -> None:
    values, expected, goals = CASES[words]
    name, *options = words.split()
    command = [sys.executable, "-m", f"scripts.bench.{name}", *options, "--json", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert values(written["rows"]) >= expected and len(written["goals"]) >= goals
    lines = done.stdout.splitlines()[-len(written["goals"]) :] if goals else []
    for goal, line in zip(written["goals"], lines):
        assert line.startswith(f"- {goal['name']}: {goal['goal']}, measured ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
