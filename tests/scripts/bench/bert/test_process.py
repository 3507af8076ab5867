"""What goes wrong in a cell ends that cell alone, with its reason."""

from pathlib import Path

import pytest

from scripts.bench.bert import measure, process
from scripts.bench.bert.cells import TINY, Cell
from trainer.errors import ConfigError

CELL = Cell("speed", "bare loop", 16, 2, size=TINY, warm=1, timed=1)


@pytest.mark.parametrize(
    ("error", "reason", "failed"),
    [
        (ConfigError("trainer.precision=fp8: needs torchao"), "refused: trainer.precision=fp8: needs torchao", False),
        (MemoryError("too much"), "out of memory (too much)", False),
        (ValueError("a fault of the bench"), "ValueError: a fault of the bench", True),
    ],
)
def test_an_error_is_the_outcome(error, reason, failed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(measure, "measure", fail)
    monkeypatch.setattr(measure, "one_gpu", lambda: None)
    outcome = process.attempt(CELL, tmp_path)
    assert outcome.found == {} and outcome.failed is failed and reason in outcome.reason


def test_a_cell_is_killed_at_its_limit() -> None:
    assert process.run_cell(CELL, 0.01) == ({}, "no result in 0 s", False)


@pytest.mark.slow
def test_a_cell_runs_in_a_folder_and_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = process.run_cell(CELL, 100)
    assert outcome.found["tokens/s"] > 0 and not outcome.failed
    assert not list(tmp_path.iterdir())
