"""Steps of Echelon and of a bare loop, in turns."""

from pathlib import Path

import pytest
import torch
from support.needs import needs

from scripts.bench.one_gpu import turns
from scripts.bench.one_gpu.cells import TINY, Cell

pytestmark = needs("transformers")


@pytest.mark.slow
def test_a_ratio_of_both_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ROUNDS", 1)
    monkeypatch.setattr(turns, "WARM", 45)
    cell = Cell("turns", sequence=16, micro=1, size=TINY)
    found = turns.time_turns(cell, torch.device("cpu"), tmp_path)
    assert found.keys() == {"bare loop, ms a step", "Echelon, ms a step", "ratio", "noise"}
    assert min(found.values()) > 0
