"""A dry run trains, validates and leaves nothing, in Python, in the command, and on two ranks."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.cli import toy
from support.messages import refuses
from toy_recipe import Toy

from trainer.callbacks.early_stop import EarlyStop
from trainer.config.options import CheckpointOptions, DataOptions, LimitOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.sender import SendingLogger
from trainer.trainer import Trainer


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def left(folder: Path) -> list[str]:
    """All files but the folder that torch._dynamo makes as it loads."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [name for name in names if "torchinductor_" not in name]


class Sends(SendingLogger):
    def begin(self, trainer) -> Any:
        raise AssertionError("would begin a run on a server")

    log_numbers = log_item = begin


def make(**options) -> Trainer:
    options = Options(
        dry_run=True, max_steps=9, validate_every=5, checkpoint=CheckpointOptions(every_steps=1), **options
    )
    callbacks = [MetricsFile(), EarlyStop(), Sends()]
    return Trainer(Toy(), callbacks, batch=12, options=options, data=DataOptions(workers=0))


def test_two_steps_and_a_validation_leave_nothing(tmp_path, capsys):
    trainer = make()
    summary = trainer.fit()
    assert (summary["steps"], summary["stopped"], summary["checkpoint"]) == (2, "dry_run", None)
    assert summary["val/loss"] > 0 and left(tmp_path) == ["tmp"]
    assert "dry run: nothing is sent to a server, so sends is left out\n" in capsys.readouterr().out
    with refuses("fit", "checkpoint", "resume"):
        trainer.fit()


def test_an_overfit_run_keeps_its_batches(capsys):
    """Those are its validation's, too."""
    trainer = make(overfit=1)
    assert trainer.options.limit_batches == LimitOptions() and len(trainer.plan.validation.counts) == 12
    assert trainer.fit()["stopped"] == "dry_run"
    assert "dry run: 2 steps, validations of 1 batch(es)" in capsys.readouterr().out


@pytest.mark.parametrize("devices", [1, 2])
def test_the_command_leaves_nothing(tmp_path, devices):
    done = toy(["trainer.dry_run=true", f"trainer.devices={devices}", "trainer.max_steps=9"], tmp_path)
    assert done.code == 0, done.err
    assert "dry run: 2 steps" in done.out and "val" in done.out and "at step 2" in done.out
    assert left(tmp_path) == ["tmp"]


def test_a_dry_run_does_not_resume():
    with refuses("trainer.dry_run=true", "trainer.resume=auto"):
        make(resume="auto")
