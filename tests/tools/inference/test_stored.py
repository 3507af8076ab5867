"""Which checkpoint an argument names, and which settings it takes."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.runs import make

from trainer.checkpoint.manifest import MANIFEST
from trainer.errors import ConfigError
from trainer.tools.inference.stored import find, on_ranks


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make().fit()
    return tmp_path / "ckpt" / "r" / "step-00000004"


def test_a_run_and_its_folder_of_checkpoints_name_the_newest(run):
    for given in ("runs/r", "ckpt/r", "ckpt/last.pt", str(run)):
        assert os.path.samefile(find(given, "key"), run)
    (run / MANIFEST).write_text("{}")
    assert find("runs/r", "key").name == "step-00000002"  # the newest valid one


@pytest.mark.parametrize(
    "change, way_out",
    [
        ("trainer.devices=2", "give --devices 2"),
        ("micro_batch=8", "give --micro-batch 8"),
        ("trainer.limit_batches.validation=5", "leave it out"),
        ("optimizer.lr=1", "leave it out"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(change, way_out):
    given = SimpleNamespace(checkpoint="x", changes=["recipe.val=x", "data.workers=0", "trainer.seed=1", change])
    with pytest.raises(ConfigError, match=rf"^{re.escape(change)}: changes nothing here; {way_out}$"):
        on_ranks(cast("Any", given), print)


def test_a_run_without_checkpoints_is_told(run):
    shutil.rmtree(run.parent)
    with pytest.raises(ConfigError, match=r"^key: the run's checkpoints were in \S*ckpt/r, where there are none;"):
        find("runs/r", "key")
