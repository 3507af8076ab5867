"""The leftovers of killed processes: what they were about to replace comes back, the rest goes."""

import os
import shutil
from pathlib import Path

from support.checkpoints import hidden, holds, put

from trainer.checkpoint.locate import checkpoints


def test_a_commit_sweeps_and_puts_back(run: Path) -> None:
    for step in (1, 2):
        put(run, step)
    os.rename(run / "step-00000002", run / ".old-step-00000002-0a1b2c3d")  # killed between the two renames
    shutil.copytree(run / "step-00000001", run / ".old-step-00000001-0a1b2c3d")  # killed after both
    (run / ".tmp-00000003-0").mkdir()
    put(run, 3)
    assert [holds(path) for path in checkpoints(run)] == [(1, 1), (2, 2), (3, 3)] and hidden(run) == []
