"""The files of a bench are written by rank 0 alone."""

from pathlib import Path
from typing import Any

import pytest

from trainer.process.environment import Place
from trainer.tools import bench
from trainer.tools.measure.rank import write


def test_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = bench.parser().parse_args(["--png", str(tmp_path / "b.png")])
    found: dict[str, Any] = {"about": "", "collectives": [], "fits": []}
    write(found, options, Place())
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    write(found, bench.parser().parse_args(["--json", str(tmp_path / "b.json")]), Place(rank=1, world=2))
    assert not (tmp_path / "b.json").exists(), "only rank 0 writes"
