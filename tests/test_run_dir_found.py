"""Which checkpoint an argument of a tool names."""

import os
import shutil
from pathlib import Path

import pytest
from support.messages import refuses
from support.runs import make

from trainer.checkpoint.manifest import MANIFEST
from trainer.run_dir import find_checkpoint


@pytest.fixture
def run(tmp_path) -> Path:
    make().fit()
    return tmp_path / "ckpt" / "r" / "step-00000004"


def test_a_run_and_its_folder_of_checkpoints_name_the_newest(run):
    for given in ("runs/r", "ckpt/r", "ckpt/last.pt", str(run)):
        assert os.path.samefile(find_checkpoint(given, "key"), run)
    (run / MANIFEST).write_text("{}")
    assert find_checkpoint("runs/r", "key").name == "step-00000002"  # the newest valid one


def test_a_run_without_checkpoints_is_refused(run):
    shutil.rmtree(run.parent)
    with refuses("key", "checkpoints"):
        find_checkpoint("runs/r", "key")
