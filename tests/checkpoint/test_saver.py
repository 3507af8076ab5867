"""Checkpoints are written beside training: what is in them, what a slow disk or one that fails does, how it ends."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from support.messages import refuses
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.checkpoint import commit, locate, manifest, retention
from trainer.checkpoint.lock import Claim
from trainer.checkpoint.saver import Saver, State
from trainer.checkpoint.serialize import load_state
from trainer.comm.ranks import Ranks
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError, exit_code
from trainer.process.environment import Place
from trainer.process.heartbeat import Heartbeat
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class AtStep(Callback):
    """Calls at the ends of steps, and keeps the weights of each."""

    def __init__(self, call: Callable[[int], Any] = lambda step: None) -> None:
        self.call, self.weights = call, dict[int, dict[str, torch.Tensor]]()

    def on_step_end(self, trainer: Trainer) -> None:
        self.weights[trainer.step] = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
        self.call(trainer.step)


def make(callback: AtStep, max_steps: int = 6, resume: str | None = None, **checkpoint: Any) -> Trainer:
    options = CheckpointOptions(every_steps=2, keep=9, **checkpoint)
    return Trainer(
        Toy(), {"at": callback}, batch=12, place=Place(),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        options=Options(max_steps=max_steps, run_dir="runs/r", checkpoint=options, resume=resume),
    )  # fmt: skip


def steps() -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in locate.checkpoints(Path("ckpt/r"))]


class Held:
    """A disk on which the commit of one step takes until `let_go`; it fails where there is an error for its step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int = -1, errors: dict[int, Exception] | None = None):
        self.step, self.errors, self.gate, self.real = step, errors or {}, threading.Event(), commit.commit
        monkeypatch.setattr(commit, "commit", self.commit)

    def commit(self, run_dir: Path, step: int, *args: Any) -> Path:
        if step == self.step:
            assert self.gate.wait(60)
        if step in self.errors:
            raise self.errors[step]
        return self.real(run_dir, step, *args)

    def let_go(self) -> None:
        self.gate.set()


def test_training_goes_on_and_the_checkpoint_is_of_its_own_step(monkeypatch):
    held = Held(monkeypatch, step=2)
    seen: dict[int, list[int]] = {}

    def at(step: int) -> None:
        seen[step] = steps()
        if step == 4:
            held.let_go()

    callback = AtStep(at)
    make(callback).fit()
    assert seen[3] == seen[4] == [] and steps() == [2, 4, 6]
    for step in steps():
        stored = load_file(f"ckpt/r/step-{step:08d}/model.safetensors")
        assert all(torch.equal(stored[name], weight) for name, weight in callback.weights[step].items())
    before, after = callback.weights[2], callback.weights[3]
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("best", [False, True])
def test_what_is_due_while_the_disk_is_busy_is_left_out_only_if_so_told(monkeypatch, capsys, best):
    held, brought = Held(monkeypatch, step=2), []

    def at(step: int) -> None:
        if step == 3:
            threading.Timer(1.5, held.let_go).start()
        if step == 5:
            held.gate.wait(60)
            trainer.saver.writing and trainer.saver.writing.result()

    validate = {"keep_best": "val/loss"} if best else {}
    callback = AtStep(at)
    callback.rank_state_dict = lambda: brought.append(trainer.step) or {"step": trainer.step}
    trainer = make(callback, when_busy="skip", **validate)
    if best:
        trainer.loop.plan.next_validation = lambda step: 4
    trainer.fit()
    out = capsys.readouterr().out
    told = "checkpoint of step 4 is skipped: the checkpoint of step 2 is still being written"
    if best:  # a validated step is waited for
        assert told not in out and "waited 1." in out and steps() == [2, 4, 6]
    else:
        assert told in out and steps() == [2, 6]
    assert brought == [
        1,
        *steps(),
    ]  # a trial after the first step; what a rank keeps is copied for those that begin alone


def test_a_failure_is_told_while_training_goes_on(monkeypatch, capsys):
    told = []

    def at(step: int) -> None:
        if step == 3:
            held.let_go()
            trainer.saver.writing.result()
            told.append(capsys.readouterr().out)

    held = Held(monkeypatch, 2, errors={2: OSError(28, "No space left on device"), 4: OSError(5, "Input/output error")})
    trainer = make(AtStep(at))
    trainer.fit()
    assert "checkpoint of step 2 failed, training continues: [Errno 28] No space left on device" in told[0]
    assert steps() == [6] and trainer.step == 6


def test_so_many_failures_in_a_row_end_the_run(monkeypatch):
    full = OSError(28, "No space left on device")
    Held(monkeypatch, errors=dict.fromkeys((2, 6, 8, 10, 12), full))

    def at(step: int) -> None:
        if trainer.saver.writing:
            trainer.saver.writing.result()

    trainer = make(AtStep(at), 20, max_failures=2)
    with pytest.raises(ConfigError) as error:
        trainer.fit()
    assert str(error.value) == (
        "trainer.checkpoint.dir=ckpt: 2 checkpoints in a row failed: [Errno 28] No space left on device; "
        "fix the cause, then resume from the previous checkpoint with trainer.resume=ckpt/r"
    )
    assert trainer.step in (8, 9) and steps() == [4]  # by when the disk has answered


def test_a_run_that_fails_leaves_what_it_was_writing_whole(monkeypatch):
    """And shows with each piece, which is on the disk then, that it still writes."""
    held, shown, real = Held(monkeypatch, step=2), [], Heartbeat.beat
    monkeypatch.setattr(manifest, "CHUNK", 100)
    monkeypatch.setattr(manifest, "SYNCED", 200)
    monkeypatch.setattr(os, "fdatasync", lambda file: shown.append("synced"))
    monkeypatch.setattr(Heartbeat, "beat", lambda *args, **how: (shown.append(how.get("busy")), real(*args, **how)))

    def at(step: int) -> None:
        if step == 3:
            threading.Timer(0.2, held.let_go).start()
            raise RuntimeError("user's mistake")

    with pytest.raises(RuntimeError, match="user's mistake"):
        make(AtStep(at)).fit()
    assert steps() == [2]
    written = shown[shown.index(True) : len(shown) - shown[::-1].index(True)]
    assert shown.count(True) > 10 and written.count("synced") > 5 and set(written) == {True, "synced"}


def test_a_stop_waits_for_what_is_written_and_adds_the_last(monkeypatch):
    held = Held(monkeypatch, step=2)

    def at(step: int) -> None:
        if step == 3:
            threading.Timer(0.2, held.let_go).start()
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(AtStep(at), 1000)
    trainer.fit()
    assert trainer.stop_reason == "signal" and steps()[0] == 2 and steps()[-1] == trainer.step


@pytest.mark.parametrize("first", [True, False])
def test_a_stop_whose_checkpoint_fails_relies_on_the_one_before(monkeypatch, capsys, first):
    """A scheduler starts it again then; not where there is none, for it would begin anew each time."""
    full = Mock(side_effect=OSError(28, "No space left on device"))
    Held(monkeypatch, errors=dict.fromkeys(range(1 if first else 3, 999), full.side_effect))
    trainer = make(AtStep(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None), 1000)
    if first:
        with refuses("trainer.checkpoint.dir=ckpt", "checkpoint", "last", "failed", "space", "trainer.resume=ckpt/r"):
            trainer.fit()
        return
    monkeypatch.setattr("trainer.files.write_whole", full)
    trainer.fit()
    assert trainer.stop_reason == "signal" and steps() == [2] and trainer.checkpoint == Path("ckpt/r/step-00000002")
    told = f"the last step, {trainer.step}, is in no checkpoint; ckpt/r/step-00000002 is the newest"
    assert told in (out := capsys.readouterr().out) and "Options(resume='ckpt/r')" in out
    assert "runs/r/summary.json: can't be written: No space left on device" in out


def test_nor_does_one_whose_failures_become_too_many_in_that_step(monkeypatch, capsys):
    def at(step: int) -> None:
        if step == 5:
            held.let_go()  # no sooner: the step before would end the run
            trainer.saver.writing.result()
            os.kill(os.getpid(), signal.SIGTERM)
            while not trainer.signals.name:
                time.sleep(0.01)

    held = Held(monkeypatch, step=4, errors=dict.fromkeys((4, 5), OSError(28, "No space left on device")))
    trainer = make(AtStep(at), 1000, max_failures=1)
    trainer.fit()
    assert (trainer.stop_reason, trainer.step, steps()) == ("signal", 5, [2])
    assert "the last step, 5, is in no checkpoint; ckpt/r/step-00000002 is the newest" in capsys.readouterr().out


def test_a_checkpoint_that_is_written_is_no_failure_where_older_ones_stay(monkeypatch, capsys):
    monkeypatch.setattr(retention, "retain", Mock(side_effect=OSError(30, "Read-only file system")))
    make(AtStep(), 4).fit()
    out = capsys.readouterr().out
    assert "checkpoint of step 2 is written, but older ones can't be removed: [Errno 30] Read-only file system" in out
    assert "failed" not in out
    assert steps() == [2, 4]


def test_the_last_checkpoint_that_can_not_be_written_is_one_line_after_the_summary(monkeypatch):
    Held(monkeypatch, errors={4: OSError(28, "No space left on device")})
    with pytest.raises(ConfigError) as error:
        make(AtStep(), 4).fit()
    assert str(error.value) == (
        "trainer.checkpoint.dir=ckpt: the checkpoint of the last step, 4, failed: [Errno 28] No space left on device; "
        "fix the cause, then resume from the previous checkpoint with trainer.resume=ckpt/r"
    )
    assert json.loads(Path("runs/r/summary.json").read_text())["steps"] == 4


def test_a_checkpoint_that_no_link_can_lead_to_is_one_all_the_same(monkeypatch, capsys):
    """As on a file system that has none."""
    thinned = []
    monkeypatch.setattr(retention, "retain", lambda *_: thinned.append(steps()))
    Path("ckpt/last.pt").mkdir(parents=True)
    trainer = make(AtStep(), max_failures=1)
    trainer.fit()
    assert thinned == [[2], [2, 4], [2, 4, 6]] and trainer.checkpoint == Path("ckpt/r/step-00000006")
    out = capsys.readouterr().out
    assert (
        "checkpoint of step 4 is written, but last.pt does not point to it: [Errno 17] is no link to a checkpoint"
        in out
    )
    assert "failed" not in out


def test_our_own_mistake_is_not_taken_for_a_bad_disk(monkeypatch):
    Held(monkeypatch, errors={2: ZeroDivisionError("ours")})
    with pytest.raises(ZeroDivisionError, match="ours"):
        make(AtStep(), 1000).fit()
    assert steps() == []


def test_one_that_another_process_writes_by_now_is_not_thinned_out(monkeypatch):
    """As the other goes on from what is deleted then."""
    real, removed = commit.commit, []

    def commit_and_begin(run_dir: Path, step: int, *args: Any) -> Path:
        written = real(run_dir, step, *args)
        if step == 4:
            commit.begin(run_dir)
        return written

    monkeypatch.setattr(commit, "commit", commit_and_begin)
    monkeypatch.setattr(retention, "retain", lambda *_: removed.append(steps()))
    with refuses("trainer.checkpoint.dir=ckpt", "nothing"):
        make(AtStep(), 1000).fit()
    assert removed == [[2]]


def test_nor_is_what_it_has_written_set_aside():
    """By a resume from an older one, that was stopped as it began."""
    make(AtStep()).fit()
    trainer = make(AtStep(), 1000, resume="ckpt/r/step-00000002")
    trainer.command.save_config = lambda run_dir: commit.begin(Path("ckpt/r"))
    with refuses("trainer.checkpoint.dir=ckpt", "nothing"):
        trainer.fit()
    assert steps() == [2, 4, 6]


def test_a_run_that_another_process_writes_by_now_ends_for_good():
    def at(step: int) -> None:
        if step == 3:
            trainer.saver.writing.result()
            commit.begin(Path("ckpt/r"))  # as a process does that takes this one for dead, where no lock keeps it out

    trainer = make(AtStep(at), 1000)
    with refuses("trainer.checkpoint.dir=ckpt", "attempt", "2") as error:
        trainer.fit()
    assert exit_code(error.value) == 78 and trainer.step in range(4, 8) and steps() == [2]


def test_it_saves_without_a_trainer():
    """Plain dicts, and one rank."""
    ranks, folder = Ranks(Place(), "cpu", "auto", 60.0), Path("saved/run")
    saver = Saver(folder, CheckpointOptions(), ranks, Heartbeat(""), Claim(folder))
    states = {step: {"model": {"w": torch.full((3,), float(step))}, "epoch": step} for step in (1, 2)}
    for step, state in states.items():
        saver.save(step, lambda state=state: State(state, {}, {"about": "nothing"}), last=step == 2)
        saver.check()
    saver.close()
    found = locate.resolve("auto", folder.parent, None)
    assert saver.newest == folder / "step-00000002" and found == saver.newest.resolve()
    for step, state in states.items():
        checkpoint = folder / f"step-{step:08d}"
        saved = load_state(checkpoint, (made := manifest.verify(checkpoint))["files"])
        assert made["about"] == "nothing" and saved["epoch"] == step
        assert torch.equal(saved["model"]["w"], state["model"]["w"])
    Claim(folder).close()  # it has let go
