"""What these tests share: the folder of a run."""

from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where a run's checkpoints are."""
    return tmp_path / "ckpt" / "run"
