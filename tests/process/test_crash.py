"""The error of a run is in its folder: one line in summary.json, all frames in the log, and the first cause stays."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import PYTHONPATH, QUICK, TOY, run, toy
from support.quick import quick
from support.runs import make
from toy_recipe import Toy

from trainer import files
from trainer.errors import ConfigError
from trainer.process.crash import note_crash, read_summary, summarize_crash

DONE = {"steps": 3, "samples": 36}


def note(folder: Path, error: Exception, rank: int = 0, world: int = 1, follows: bool = False, **done: int) -> Any:
    note_crash(folder, error, rank, world, DONE | done, follows)
    return json.loads((folder / "summary.json").read_text())


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as same:
        return same


def test_an_error_is_a_line_in_the_summary_and_frames_in_the_log(tmp_path):
    found = note(tmp_path, raised(KeyError("a\nb")))
    assert found == {**DONE, "stopped": "error", "error": "KeyError: 'a\\nb'"}
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert " ERROR Traceback" in log and "in raised" in log


def test_a_mistake_of_the_users_has_its_frames_in_the_log_alone(tmp_path):
    """The terminal has the line."""
    found = note(tmp_path, raised(ConfigError("recipe.loss(): returned None; return a loss")))
    assert found["error"] == "echelon: recipe.loss(): returned None; return a loss"
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert " ERROR echelon: recipe.loss(): returned None; return a loss\nTraceback" in log and "in raised" in log


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("one\ntwo"), "RuntimeError: one"),
        (KeyError(), "KeyError"),
        (ValueError("Caught ValueError in DataLoader worker process 0.\nTraceback\nValueError: a\n"), "ValueError: a"),
        (RuntimeError("\x1b[2J"), "RuntimeError: ?[2J"),
        (OSError(errno.ENOSPC, "No space left", "ckpt/x"), "echelon: ckpt/x: No space left; make room, then"),
        (MemoryError(), "echelon: out of memory; try a smaller micro_batch"),
    ],
)
def test_the_line_of_an_error(error, line, tmp_path):
    assert note(tmp_path, error)["error"].startswith(line)


def test_the_rank_is_named_and_an_error_that_follows_replaces_no_other(tmp_path):
    assert note(tmp_path, KeyError("a"), 1, 2)["error"] == "rank 1: KeyError: 'a'"
    assert not (tmp_path / "logs").exists()  # rank 1 prints into its log itself
    assert note(tmp_path, RuntimeError("lost"), 0, 2, follows=True, steps=2)["error"] == "rank 1: KeyError: 'a'"
    assert note(tmp_path, RuntimeError("lost"), 0, 2, follows=True, steps=5)["error"] == "rank 0: RuntimeError: lost"
    assert note(tmp_path, KeyError("b"), 1, 2, steps=5)["error"] == "rank 1: KeyError: 'b'"


def test_numbers_of_a_trained_run_stay(tmp_path):
    """Its export has failed, say."""
    (tmp_path / "summary.json").write_text(json.dumps({"val/loss": 0.5, "stopped": "max_steps", **DONE}))
    found = note(tmp_path, KeyError("a"))
    assert found == {"val/loss": 0.5, "stopped": "error", "error": "KeyError: 'a'", **DONE}
    assert note(tmp_path, KeyError("b")) == found | {"error": "KeyError: 'b'"}
    assert "val/loss" not in note(tmp_path, KeyError("a"), steps=4)


class Failing(Toy):
    def model(self) -> torch.nn.Module:
        raise RuntimeError("no model")


def test_numbers_of_a_finished_run_stay_if_a_resume_fails_before_it_loads_the_state(tmp_path):
    finished = make(max_steps=1).fit()
    with pytest.raises(RuntimeError, match="no model"):
        make(Failing(), resume="auto")
    found = read_summary(tmp_path / "runs/r/summary.json")
    assert (found["steps"], found["samples"], found["stopped"]) == (1, 12, "error")
    assert found["val/loss"] == finished["val/loss"] and found["error"] == "RuntimeError: no model"


@pytest.mark.parametrize("content", ["", "[1]", "{", None])
def test_a_damaged_summary_is_replaced(content, tmp_path):
    file = tmp_path / "summary.json"
    if content is not None:
        file.write_text(content)
    assert read_summary(file) == {}
    summarize_crash(file, "echelon: rank 1 was killed by SIGKILL", {"steps": 2})
    assert read_summary(file)["stopped"] == "error"


def test_a_full_disk_hides_no_error(tmp_path, monkeypatch):
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.process.crash.write_json", full)
    assert files.write_json is not full
    note_crash(tmp_path, KeyError("a"), 0, 1, DONE, False)
    assert "KeyError" in (tmp_path / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("trouble", "rank", "line"),
    quick(
        [
            ("SIGKILL", 1, "echelon: rank 1 was killed by SIGKILL; its log: runs/r/logs/rank1.log"),
            ("raise", 1, "rank 1: RuntimeError: trouble at step 3"),
            ("raise", 0, "rank 0: RuntimeError: trouble at step 3"),
        ],
        2,
    ),
)
def test_the_summary_has_the_first_cause_whatever_rank_failed(trouble, rank, line, tmp_path):
    words = ["+callbacks=[probe]", f"callbacks.probe.trouble={trouble}", f"callbacks.probe.rank={rank}"]
    crashed = toy([*words, "trainer.devices=2", "trainer.restarts=0", "trainer.run_dir=runs/r"], tmp_path)
    assert crashed.code == (137 if trouble == "SIGKILL" else 1), crashed.err
    found = read_summary(tmp_path / "runs/r/summary.json")
    assert (found["stopped"], found["error"]) == ("error", line)
    assert found["steps"] == (2 if trouble == "SIGKILL" else 3)  # a rank beats at the end of a step
    log = (tmp_path / f"runs/r/logs/rank{rank}.log").read_text()
    assert trouble != "raise" or "trouble at step 3" in log


FAILED_DEVICE = """
import atexit

import trainer.summary
from toy_recipe import Toy

trainer.summary.has_failed = lambda device: True


class Failing(Toy):
    def __init__(self, where, **sizes):
        super().__init__(**sizes)
        self.where = where

    def fail(self, where):
        if where == self.where:
            atexit.register(print, "an orderly end")
            raise RuntimeError("device-side assert")

    def loss(self, model, batch):
        self.fail("loss")
        return super().loss(model, batch)

    def metrics(self, model, batch):
        self.fail("metrics")
        return {"zero": (model(batch["x"]).sum() * 0, 1)}
"""
TORCHRUN = ["--nproc-per-node", "2", "-m", "trainer.main"]


@pytest.mark.parametrize(
    ("where", "words", "command"),
    [
        ("loss", [], "trainer.main"),
        ("metrics", [], "trainer.main"),
        ("loss", ["trainer.devices=2", "trainer.restarts=0"], "trainer.main"),
        pytest.param("loss", [], "torch.distributed.run", marks=pytest.mark.slow),
    ],
)
def test_a_command_whose_device_has_failed_tells_why_and_ends_at_once(where, words, command, tmp_path):
    (tmp_path / "failing.py").write_text(FAILED_DEVICE)
    words = [*TOY, *QUICK, "recipe._target_=failing.Failing", f"+recipe.where={where}", *words]
    words += ["trainer.allow_targets=[toy_recipe,failing]", "trainer.run_dir=runs/r"]
    launched = command != "trainer.main"
    path = os.pathsep.join([str(tmp_path), PYTHONPATH])
    failed = run([*TORCHRUN, *words] if launched else words, tmp_path, command, PYTHONPATH=path)
    assert failed.code == 1 and "an orderly end" not in failed.out
    assert failed.err.count("RuntimeError: device-side assert") == 1 + launched, failed.err  # torchrun's, of each rank
    found = read_summary(tmp_path / "runs/r/summary.json")["error"]
    assert found.endswith("RuntimeError: device-side assert")
