"""The command that exports from any checkpoint: its weights, and one line for what can't be."""

import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cli import Result, run
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.checkpoint import serialize
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.tools.export import export as make_export
from trainer.tools.export import main
from trainer.trainer import Trainer

TRUSTED = "trainer.allow_targets=[mine,toy_recipe]"
EXPORT = "trainer.tools.export"
RECIPE = """
from pathlib import Path

from safetensors.torch import save_file
from toy_recipe import Toy as Base

class Toy(Base):
    def __init__(self, width: int = 8):
        super().__init__(width=width)

    def data(self, split):
        points = super().data(split)
        points.fingerprint = Path("points.txt").read_text()
        return points

class Exporting(Toy):
    def export(self, model, folder):
        save_file(model.state_dict(), folder / "exported.safetensors")
        (folder / "exported.safetensors").chmod(0o600)  # as some versions of safetensors leave it
"""
CONFIG = """
# @package _global_
recipe: {_target_: mine.Exporting, width: 8}
batch: 12
trainer: {max_steps: 4, allow_targets: [mine, toy_recipe], run_dir: runs/r, checkpoint: {every_steps: 2, keep: 9}}
data: {workers: 0}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of 4 steps that kept an average, by a name of its own, which its export was of."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "mine.py").write_text(RECIPE)
    (folder / "points.txt").write_text("release 1")
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "conf" / "recipe" / "mine.yaml").write_text(CONFIG)
    average = "+callbacks.avg={_target_: trainer.callbacks.ema.EMA, decay: 0.5}"
    done = run(["--config-dir", "conf", "recipe=mine", average, "~callbacks.tensorboard"], folder)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def cwd(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def export(cwd: Path, checkpoint: str, folder: str = "out/deep") -> Result:
    return run([checkpoint, folder, TRUSTED], cwd, EXPORT)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_last_is_the_runs_own_export_and_an_older_one_its_average(cwd):
    before = files(cwd / "ckpt") | files(cwd / "runs")
    (cwd / "out" / "deep").mkdir(parents=True)  # into an empty folder that is there, too
    done = export(cwd, "ckpt/last.pt")
    assert done.code == 0, done.err
    assert files(cwd / "out" / "deep") == files(cwd / "runs" / "r" / "export")
    for folder in ("out/deep", "runs/r/export"):
        assert os.stat(cwd / folder / "exported.safetensors").st_mode == os.stat(cwd / "mine.py").st_mode
    mine = cwd / "out" / "deep" / "exported.safetensors"
    mine.write_text("the user's own")
    done = export(cwd, "ckpt/r/step-00000002")
    line = "echelon: FOLDER=out/deep: holds files, which the export could replace; give a new folder\n"
    assert (done.code, done.err, mine.read_text()) == (78, line, "the user's own")
    assert export(cwd, "ckpt/r/step-00000002", "average").code == 0
    average = load_file(cwd / "ckpt/r/step-00000002/callbacks.safetensors")
    exported = load_file(cwd / "average/exported.safetensors")
    assert {f"avg/{name}": tensor.tolist() for name, tensor in exported.items()} == {
        name: tensor.tolist() for name, tensor in average.items()
    }
    assert files(cwd / "ckpt") | files(cwd / "runs") == before


def test_a_run_from_before_its_monitors_moved(cwd):
    """Its config names the modules in which they lay."""
    path = cwd / "runs/r/config.yaml"
    text = path.read_text()
    path.write_text(text.replace("trainer.monitors.", "trainer.callbacks."))
    assert path.read_text() != text
    assert export(cwd, "ckpt/last.pt").code == 0
    assert files(cwd / "out" / "deep") == files(cwd / "runs" / "r" / "export")


def damage(cwd: Path) -> None:
    (cwd / "ckpt/r/step-00000004/model.safetensors").write_bytes(b"")


def other_model(cwd: Path) -> None:
    path = cwd / "runs/r/config.yaml"
    path.write_text(path.read_text().replace("width: 8", "width: 12"))


def fewer_layers(cwd: Path) -> None:
    (cwd / "mine.py").write_text((cwd / "mine.py").read_text().replace("width=width", "width=width, depth=1"))


def other_data(cwd: Path) -> None:
    (cwd / "points.txt").write_text("release 2")


def no_export(cwd: Path) -> None:
    path = cwd / "runs/r/config.yaml"
    path.write_text(path.read_text().replace("mine.Exporting", "mine.Toy"))


def no_run(cwd: Path) -> None:
    shutil.rmtree(cwd / "runs/r")


def cut(cwd: Path) -> None:
    """As a power loss does."""
    (cwd / "runs/r/config.yaml").write_text("")


def a_file(cwd: Path) -> None:
    (cwd / "out").write_text("")


@pytest.mark.parametrize(
    ("spoil", "checkpoint", "message"),
    [
        (
            None,
            "nowhere",
            "CHECKPOINT=nowhere: .*nowhere: is missing; give runs/NAME, ckpt/last.pt or a whole folder step-",
        ),
        (
            None,
            "conf",
            "CHECKPOINT=conf: .*MANIFEST.json: is missing; give runs/NAME, ckpt/last.pt or a whole folder step-",
        ),
        (damage, "ckpt/last.pt", "CHECKPOINT=ckpt/last.pt: .*model.safetensors: 0 bytes, its manifest says"),
        (other_model, "ckpt/last.pt", "CHECKPOINT=ckpt/last.pt: .* have another shape .*; give weights of this model"),
        (fewer_layers, "ckpt/last.pt", "CHECKPOINT=ckpt/last.pt: 0 weights are missing, 2 are unknown"),
        (
            other_data,
            "ckpt/last.pt",
            r"CHECKPOINT=ckpt/last.pt: the data has changed since the training \(was \w{12}, is \w{12}\);",
        ),
        (no_export, "ckpt/last.pt", "CHECKPOINT=ckpt/last.pt: Toy has no method `export`"),
        (
            cut,
            "ckpt/last.pt",
            r".*/config.yaml can't be read \(has no recipe, callbacks, .*; restore",
        ),
        (no_run, "ckpt/last.pt", "CHECKPOINT=ckpt/last.pt: its run's runs/r/config.yaml is not here"),
        (a_file, "ckpt/last.pt", "FOLDER=out: can't be written: File exists; give another folder"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_can_not_be_exported_is_one_line(spoil, checkpoint, message, cwd, monkeypatch, capsys):
    if spoil:
        spoil(cwd)
    before = files(cwd / "ckpt") | files(cwd / "runs")
    monkeypatch.chdir(cwd)
    monkeypatch.syspath_prepend(str(cwd))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "argv", ["export", checkpoint, "out", TRUSTED])
    assert main() == 78
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(f"echelon: {message}", error)
    assert files(cwd / "ckpt") | files(cwd / "runs") == before


def test_a_run_of_the_users_own_needs_no_permission(trained, tmp_path):
    """Its config has a signature, which a copy elsewhere has not: that may be a stranger's."""
    own = run(["runs/r", str(tmp_path / "out")], trained, EXPORT)
    assert (own.code, "ckpt/r/step-00000004 -> " in own.out) == (0, True), own.err
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    copied = run(["runs/r", "out"], tmp_path / "copy", EXPORT)
    assert copied.code == 78 and "mine is not a package that configs may name" in copied.err
    assert not (tmp_path / "copy" / "out").exists()


def test_what_is_not_exported_is_not_read(cwd, monkeypatch):
    """What ranks keep of their own may be larger than all else, times the ranks."""
    read, real = [], serialize.load_file
    monkeypatch.setattr(serialize, "load_file", lambda path: read.append(os.readlink(path)) or real(path))
    monkeypatch.chdir(cwd)
    monkeypatch.syspath_prepend(str(cwd))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "argv", ["export", "ckpt/last.pt", "out", TRUSTED])
    assert main() == 0
    assert {Path(name).name for name in read} == {"callbacks.safetensors"}  # which has the average


class Stops(Callback):
    def __init__(self, config: bool) -> None:
        self.config = config

    def on_step_end(self, trainer) -> None:
        if self.config:
            (trainer.run_dir / "config.yaml").touch()  # as the command does
        trainer.stop("signal")


class Exporting(Toy):
    paths, text, cache = ("text", "cache"), "my text", None

    def export(self, model, folder: Path) -> None:
        raise AssertionError("not before the end")


def test_a_run_that_is_stopped_says_how_to_export_it(tmp_path, capsys):
    """Packages and paths are in the command, for none are taken from the run's config, which a program's run lacks."""
    options = Options(run_dir="runs/r", allow_targets=["mine"])
    Trainer(Exporting(), {"stops": Stops(True)}, batch=12, options=options, data=DataOptions(0)).fit()
    (command,) = re.findall("^export with (.*)$", capsys.readouterr().out, re.MULTILINE)
    expected = [
        "export",
        "ckpt/r/step-00000001",
        "runs/r/export",
        "trainer.allow_targets=[mine]",
        "recipe.text=my text",
    ]
    assert shlex.split(command)[-5:] == expected
    options = replace(options, run_dir="runs/s")
    Trainer(Exporting(), {"stops": Stops(False)}, batch=12, options=options, data=DataOptions(0)).fit()
    told = capsys.readouterr().out
    assert "resume with Options(resume='ckpt/s')\nexport with the run's end: it exports after a resume\n" in told


def test_a_run_made_in_python_has_no_config_to_export_from(tmp_path):
    options = Options(run_dir="runs/r", max_steps=1)
    checkpoint = Trainer(Toy(), batch=12, options=options, data=DataOptions(0)).fit()["checkpoint"]
    told = "its run has no config.yaml, which a Trainer made in Python does not write; make a Trainer with "
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_export(checkpoint, Path("out"), [])


@pytest.mark.parametrize("change", ["micro_batch=8", "trainer.precision=bf16", "trainer.checkpoint.dir=x", "batch=4"])
def test_a_setting_that_changes_nothing_is_refused(change):
    with pytest.raises(ConfigError, match=rf"^{re.escape(change)}: changes nothing here; leave it out$"):
        make_export("x", Path("out"), ["recipe.x=1", "data.workers=0", "trainer.seed=1", change])


def test_only_what_is_missing_is_asked_for(monkeypatch, capsys):
    """KEY=VALUE may be left out."""
    monkeypatch.setattr(sys, "argv", ["export", "ckpt/last.pt"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("echelon export: the following arguments are required: folder; see ")


@pytest.mark.slow
def test_a_run_whose_ranks_have_parts_of_the_state(cwd):
    """Its checkpoint has the weights in one file, and the optimizer's state in one of each rank."""
    two = ["trainer.devices=2", "trainer.accelerator=cpu", "trainer.run_dir=runs/two", "callbacks.shard.stage=2"]
    done = run(["--config-dir", "conf", "recipe=mine", "+callbacks=[shard]", "~callbacks.tensorboard", *two], cwd)
    assert done.code == 0, done.err
    assert (cwd / "ckpt/two/step-00000004/part-00001.safetensors").exists()
    done = export(cwd, "ckpt/last.pt")
    assert done.code == 0, done.err
    assert files(cwd / "out" / "deep") == files(cwd / "runs" / "two" / "export")


@pytest.mark.slow
def test_an_average_that_has_not_begun_is_left_to_the_weights(cwd):
    words = ["--config-dir", "conf", "recipe=mine", "~callbacks.tensorboard", "trainer.run_dir=runs/swa"]
    done = run([*words, "+callbacks=[swa]", "callbacks.swa.start=3", "callbacks.swa.every=1"], cwd)
    assert done.code == 0, done.err
    for step, own in ((2, "model.safetensors"), (4, "callbacks.safetensors")):
        shutil.rmtree(cwd / "out", ignore_errors=True)
        done = export(cwd, f"ckpt/swa/step-0000000{step}")
        assert done.code == 0, done.err
        saved = load_file(cwd / f"ckpt/swa/step-0000000{step}" / own)
        exported = load_file(cwd / "out" / "deep" / "exported.safetensors")
        prefix = "swa/average/" if step == 4 else ""
        assert all(torch.equal(tensor, saved[f"{prefix}{name}"]) for name, tensor in exported.items())
    assert files(cwd / "out" / "deep") == files(cwd / "runs" / "swa" / "export")


@pytest.mark.slow
def test_the_average_of_a_run_whose_ranks_have_rows(cwd):
    """No rank has the whole of it; a run on one rank starts from the weights, not from the average."""
    average = "+callbacks.avg={_target_: trainer.callbacks.ema.EMA, decay: 0.5}"
    three = ["trainer.devices=3", "trainer.accelerator=cpu", "trainer.run_dir=runs/three", "callbacks.shard.stage=3"]
    words = ["--config-dir", "conf", "recipe=mine", "~callbacks.tensorboard"]
    done = run([*words, "+callbacks=[shard]", average, *three], cwd)
    assert done.code == 0, done.err
    done = export(cwd, "ckpt/last.pt")
    assert done.code == 0, done.err
    parts = [load_file(cwd / f"ckpt/three/step-00000004/part-0000{rank}.safetensors") for rank in range(3)]
    exported = load_file(cwd / "out" / "deep" / "exported.safetensors")
    for name, tensor in exported.items():
        own, weights = (torch.cat([part[f"{kind}/{name}"] for part in parts]) for kind in ("callbacks/avg", "model"))
        assert torch.equal(tensor, own) and not torch.equal(tensor, weights)
    alone = ["trainer.devices=1", "trainer.run_dir=runs/alone", "trainer.init_from=ckpt/three/step-00000004"]
    done = run([*words, *alone, "trainer.max_steps=0", "trainer.clip_norm=null"], cwd)
    assert done.code == 0, done.err
    started = load_file(cwd / "ckpt/alone/step-00000000/model.safetensors")
    for name, tensor in started.items():
        assert torch.equal(tensor, torch.cat([part[f"model/{name}"] for part in parts]))
