"""A resume of a run that has ended changes nothing; a refused run leaves no folder behind."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.callbacks import OBSERVERS
from support.cli import toy
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from support.runs import make
from toy_recipe import Toy

from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.shard.callback import Shard
from trainer.errors import ConfigError
from trainer.log import log
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


def everything() -> dict[str, Any]:
    """All that is in the current folder: bytes of files, targets of links, and folders."""
    found = {}
    for path in Path().rglob("*"):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def told(capsys) -> str:
    """All that was printed, but for what a callback says of one rank."""
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if not line.startswith("one rank"))


class Exports(Toy):
    exported = 0

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        (folder / "model.txt").write_text("exported")
        Exports.exported += 1


def observed(patience: int = 9, **options: Any) -> Trainer:
    callbacks = {name: new() for name, new in OBSERVERS.items()} | {"early_stop": EarlyStop("val/loss", patience, 9.0)}
    return make(Exports(), callbacks, **{"validate_every": 2, "checkpoint": {"keep_best": "val/loss"}, **options})


@pytest.mark.parametrize(
    ("resume", "max_steps", "step"),
    [("auto", 4, 4), ("ckpt/r", 2, 4), ("ckpt/last.pt", 4, 4), ("ckpt/r/step-00000002", 2, 2)],
)
def test_a_run_that_has_made_its_steps(resume, max_steps, step, capsys):
    observed(checkpoint={"keep": 9, "keep_best": "val/loss"}).fit()
    before, exported = everything(), Exports.exported
    assert json.loads(before["runs/r/summary.json"])["export"] == "runs/r/export"
    capsys.readouterr()
    again = observed(resume=resume, max_steps=max_steps, run_dir="runs/r" if resume == "auto" else None)
    again.fit()
    assert everything() == before and Exports.exported == exported
    text = "nothing to do: runs/r has finished at step 4, and stays as it is"
    assert told(capsys) == f"{text}; a trainer.max_steps above {step} would resume it"
    assert (again.step, again.samples, again.stop_reason) == (step, 12 * step, "max_steps")
    saved = load_file(f"ckpt/r/step-{step:08d}/model.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in again.module.state_dict().items())
    trained = observed(resume="auto", max_steps=5)
    trained.fit()
    assert trained.step == 5 and everything() != before


def test_a_run_that_early_stop_has_ended(capsys):
    first = observed(patience=1, max_steps=20)
    first.fit()
    before = everything()
    summary = json.loads(before["runs/r/summary.json"])
    assert summary["steps"] == 4 and summary["stopped"].startswith("early_stop: val/loss has not improved")
    assert f"finished at step 4 after {first.seconds:.1f} s: early_stop" in capsys.readouterr().out
    again = observed(patience=1, max_steps=30, resume="auto")
    again.fit()
    assert everything() == before and again.stop_reason == summary["stopped"]
    assert told(capsys) == (
        f"nothing to do: runs/r has finished at step 4 ({summary['stopped']}), and stays as it is; "
        "another setting of callbacks.early_stop would resume it"
    )
    more = observed(patience=2, max_steps=30, resume="auto")
    more.fit()
    assert more.step == 6
    without = make(Exports(), resume="auto", max_steps=8, accept=["callbacks"])
    without.fit()
    assert without.step == 8


@pytest.mark.parametrize("lost", ["summary", "crash", "export", "checkpoint"])
def test_what_an_ended_run_lacks_is_made(lost):
    observed(patience=1, max_steps=20).fit()
    file = Path("runs/r/summary.json")
    summary = json.loads(file.read_text())
    if lost == "summary":
        file.unlink()
    elif lost == "crash":
        file.write_text(json.dumps({"stopped": "error", "steps": 4}))
    elif lost == "export":  # killed meanwhile
        file.write_text(json.dumps(summary | {"export": None}))
        shutil.rmtree("runs/r/export")
    else:
        shutil.rmtree("ckpt/r/step-00000004")
    observed(patience=1, max_steps=20, resume="auto").fit()
    again = json.loads(file.read_text())
    assert (again["steps"], again["stopped"], again["export"]) == (4, summary["stopped"], "runs/r/export")
    assert Path("runs/r/export/model.txt").exists() and again["val/loss"] == summary["val/loss"]


def ended(place: Place, steps: int) -> tuple[int, float]:
    trainer = make(callbacks={"shard": Shard(stage=3)}, place=place, resume="auto", max_steps=steps)
    trainer.fit()
    return trainer.step, sum(p.sum().item() for p in trainer.parameters)


def test_ranks_with_parts_of_the_model_load_them_and_write_nothing():
    first = run_ranks(2, ended, 4)
    before = everything()
    assert run_ranks(2, ended, 4) == first
    assert everything() == before


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_by_command(devices):
    words = [f"trainer.devices={devices}", "trainer.accelerator=cpu", "trainer.run_dir=runs/r", "trainer.max_steps=4"]
    first = toy([*words], Path.cwd())
    assert first.code == 0, first.err
    before = everything()
    again = toy([*words, "trainer.resume=auto"], Path.cwd())
    assert (again.code, again.err) == (0, "")
    assert again.out.count("\n") == 1 and again.out.startswith(
        "nothing to do: runs/r has finished at step 4, and stays"
    )
    assert everything() == before


class Refuses(Toy):
    def model(self) -> Any:
        raise ConfigError("recipe.width=0: must be more")


@pytest.mark.parametrize("made", ["", "runs", "ckpt"])
@pytest.mark.parametrize("run_dir", [None, "runs/r", "a/b/r"])
def test_a_refused_run_leaves_no_folder_of_its_own(run_dir, made):
    """Folders that were there before stay."""
    if made:
        Path(made).mkdir()
    with refuses("recipe.width=0"):
        make(Refuses(), run_dir=run_dir)
    assert everything() == ({made: None} if made else {})


@pytest.mark.parametrize("older", [False, True])
def test_a_run_that_is_refused_after_its_first_lines_leaves_no_log(older):
    """A log of an earlier attempt stays."""
    if older:
        Path("runs/r/logs").mkdir(parents=True)
        Path("runs/r/logs/rank0.log").write_text("earlier\n")
    trainer = make(callbacks={"early_stop": EarlyStop()}, run_dir="runs/r")
    log.info("a first line")
    with refuses("callbacks.early_stop.metric", "trainer.validate_every"):
        trainer.fit()
    assert (b"earlier\n" in (everything().get("runs/r/logs/rank0.log") or b"")) is older
    assert older or everything() == {}


def test_a_folder_that_is_refused_leaves_none_for_checkpoints():
    Path("mine").mkdir()
    Path("mine/file").write_text("precious")
    with refuses("trainer.run_dir=mine", "not a run's"):
        make(run_dir="mine")
    assert everything() == {"mine": None, "mine/file": b"precious"}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "refused", quick(["recipe.width=-1", "+callbacks=[early_stop]", "trainer.checkpoint.keep_best=val/x"])
)
def test_a_refused_command_leaves_no_empty_folder(refused, devices):
    words = [f"trainer.devices={devices}", "trainer.accelerator=cpu", "trainer.validate_every=null", refused]
    assert toy(words, Path.cwd()).code != 0
    folders = [path for path in Path().rglob("*") if path.is_dir()]
    empty = [path for path in folders if not any(file.stat().st_size for file in path.rglob("*") if file.is_file())]
    assert empty == []


def test_a_run_that_has_made_its_epochs(capsys):
    """A larger `max_steps` would change nothing."""
    observed(max_steps=None, max_epochs=0.25).fit()
    capsys.readouterr()
    observed(max_steps=None, max_epochs=0.25, resume="auto").fit()
    assert told(capsys).endswith("; a trainer.max_epochs above 0.25 would resume it")
