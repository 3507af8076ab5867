"""What happens beside the steps is in events.jsonl: of every attempt, and never in the way of a step."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cli import toy
from support.runs import make
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.files import Appended
from trainer.loggers.events import Events, is_torn
from trainer.tools.report.run import read_run

pytestmark = pytest.mark.usefixtures("tmp_path")


def events(folder: str | Path = "runs/r") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]


def kinds(folder: str | Path = "runs/r") -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in events(folder)]


def test_a_run_from_start_to_end():
    make(callbacks={"events": Events()}, validate_every=2, checkpoint={"every_steps": 3}).fit()
    found = events()
    assert sorted(kinds()) == sorted([
        ("start", 0), ("validation", 2), ("checkpoint", 3), ("validation", 4), ("checkpoint", 4), ("stop", 4),
    ])  # fmt: skip
    assert kinds()[0] == ("start", 0) and kinds()[-1] == ("stop", 4)
    assert (found[0]["ranks"], found[0]["device"]) == (1, "cpu")
    assert found[-1]["reason"] == "max_steps" and found[-1]["seconds"] > 0
    assert [event["time"] for event in found] == sorted(event["time"] for event in found)
    for event in found:
        if event["event"] == "validation":
            assert event["seconds"] > 0 and 0 < event["val/loss"] < 10
        if event["event"] == "checkpoint":
            folder = Path(f"ckpt/r/step-{event['step']:08d}")
            assert event["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
            assert event["seconds"] >= event["stall"] > 0


def test_a_resume_appends():
    make(callbacks={"events": Events()}, max_steps=2).fit()
    make(callbacks={"events": Events()}, max_steps=4, resume="auto").fit()
    assert [event for event in kinds() if event[0] != "checkpoint"] == [
        ("start", 0), ("validation", 2), ("stop", 2), ("resume", 2), ("validation", 4), ("stop", 4),
    ]  # fmt: skip


def test_a_resume_with_nothing_to_do_changes_nothing():
    make(callbacks={"events": Events()}, max_steps=2).fit()
    before = Path("runs/r/events.jsonl").read_bytes()
    make(callbacks={"events": Events()}, max_steps=2, resume="auto").fit()
    assert Path("runs/r/events.jsonl").read_bytes() == before


class Broken(Toy):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            raise RuntimeError("the third batch\nis <odd>")
        return loss


def test_a_crash_and_a_torn_line():
    with pytest.raises(RuntimeError):
        make(Broken(), {"events": Events()}).fit()
    crash = next(event for event in events() if event["event"] == "crash")
    assert crash["step"] == 2 and "is <odd>" in crash["error"] and "\n" not in crash["error"]
    with open("runs/r/events.jsonl", "a") as file:
        file.write('{"time": 17')
    make(callbacks={"events": Events()}, resume="auto").fit()
    lines = Path("runs/r/events.jsonl").read_text().splitlines()
    torn = lines.index('{"time": 17')
    assert json.loads(lines[torn + 1])["event"] == "resume"


class Spoilt(Toy):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.calls = getattr(self, "calls", 0) + model.training
        return loss * (float("nan") if model.training and self.calls == 3 else 1.0)


@pytest.mark.parametrize("action, first", [("skip", 3), ("rollback", 3)])
def test_steps_that_are_left_out(action, first):
    make(Spoilt(), {"events": Events(), "nan_guard": NanGuard(action, every=2)}).fit()
    (skip,) = (event for event in events() if event["event"] == "skip")
    assert (skip["step"], skip["first"]) == (3, first) and skip["why"].startswith("loss or gradient not finite")


def test_the_reason_of_a_callback():
    make(callbacks={"events": Events(), "early": EarlyStop("val/loss", 1, min_delta=9.0)}, validate_every=1).fit()
    assert events()[-1]["event"] == "stop" and "val/loss" in events()[-1]["reason"]


def test_a_checkpoint_that_fails(monkeypatch):
    def commit(*args: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.checkpoint.commit.commit", commit)
    with pytest.raises(ValueError):
        make(callbacks={"events": Events()}).fit()
    failed = [event for event in events() if event["event"] == "checkpoint"]
    assert failed and all("No space left" in event["error"] for event in failed)
    assert events()[-1]["event"] == "crash"


def test_a_full_disk_is_no_reason_to_end_a_run(monkeypatch):
    monkeypatch.setattr(Appended, "flush", lambda self, durably=False: None)
    make(callbacks={"events": Events()}).fit()
    assert not Path("runs/r/events.jsonl").exists()


class Told(Callback):
    """A user's callback that takes events, and adds one."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def on_event(self, trainer, event: str, facts: dict[str, Any]) -> None:
        self.heard.append((event, facts.get("step", -1)))

    def on_step_end(self, trainer) -> None:
        if trainer.step == 1:
            trainer.emit("on_event", "mine", {"path": Path("x"), "value": float("nan")})


def test_a_callback_of_ones_own_adds_and_takes_events():
    told = Told()
    make(callbacks={"events": Events(), "told": told}).fit()
    assert ("mine", -1) in told.heard and ("checkpoint", 4) in told.heard
    (mine,) = (event for event in events() if event["event"] == "mine")
    assert (mine["step"], mine["path"], mine["value"]) == (1, "x", None)


def test_torn(tmp_path):
    file = tmp_path / "e"
    assert not is_torn(file)
    for content, torn in ((b"", False), (b"a\n", False), (b"a", True)):
        file.write_bytes(content)
        assert is_torn(file) is torn


PROBE = ["+callbacks=[probe]", "trainer.run_dir=runs/r", "trainer.max_steps=6", "trainer.checkpoint.every_steps=2"]


class Signal(Callback):
    def on_step_end(self, trainer) -> None:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal():
    make(callbacks={"events": Events(), "signal": Signal()}, max_steps=10_000).fit()
    assert (events()[-1]["event"], events()[-1]["reason"]) == ("stop", "signal")


def test_ranks_that_are_started_again(tmp_path):
    """Rank 1 raises after step 3, so Echelon starts both again, from the checkpoint of step 2."""
    trouble = ["callbacks.probe.trouble=raise", "callbacks.probe.rank=1", "callbacks.probe.attempts=1"]
    done = toy([*PROBE, *trouble, "trainer.devices=2", "trainer.accelerator=cpu"], tmp_path)
    assert done.code == 0, done.err
    restart = next(event for event in events() if event["event"] == "restart")
    assert (restart["attempt"], restart["step"], restart["ranks"]) == (1, 2, 2)
    assert [event for event, _ in kinds()].count("start") == 1  # rank 0 alone writes
    run = read_run(tmp_path / "runs" / "r", "r", 100)
    assert run.state == "finished" and "failure" in {event["event"] for event in run.events}
