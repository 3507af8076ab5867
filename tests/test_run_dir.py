"""The folder of a run is new, or a run's: whatever a setting or a stranger's manifest says."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_recipe import Toy

from trainer import setup
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.loggers.metrics_file import MetricsFile
from trainer.process.environment import Place
from trainer.run_dir import stored_config
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


def make(recipe: Any = None, **options: Any) -> Trainer:
    checkpoint = CheckpointOptions(**{"every_steps": 2, **options.pop("checkpoint", {})})
    return Trainer(
        recipe or Toy(), {"metrics_file": MetricsFile()}, batch=12, place=Place(),
        options=Options(**{"max_steps": 4, "checkpoint": checkpoint, **options}), data=DataOptions(workers=0),
    )  # fmt: skip


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["conf", ".ssh", "runs/mine"])
def test_a_folder_of_the_users_own_is_refused(name):
    Path(name).mkdir(parents=True)
    Path(name, "config.yaml").write_text("precious")
    with pytest.raises(ConfigError, match=rf"^trainer\.run_dir={name}: holds files that are not a run's; give another"):
        make(run_dir=name)
    assert contents(name) == {f"{name}/config.yaml": b"precious"}


@pytest.mark.parametrize("name", ["file/x", "x" * 300, "a\0b", "file"])
def test_a_folder_that_can_not_be_made_is_one_line(name):
    Path("file").write_text("mine")
    with pytest.raises(ConfigError, match=r"^trainer.run_dir=.*: (can't be a folder: .*|is a file); give a"):
        make(run_dir=name)
    assert contents(".") == {"file": b"mine"}


@pytest.mark.parametrize("name", ["conf", "runs/r", ".ssh", "a\0b", "x" * 5000, "\ud800"])
def test_a_strangers_manifest_sends_a_run_into_no_folder_of_the_users(name, monkeypatch):
    """Not even of a run: that one's checkpoints are elsewhere."""
    make(run_dir="runs/r").fit()
    shutil.copytree("ckpt/r", Path("downloads", name if name in ("conf", ".ssh") else "r"))
    for folder in ("conf", ".ssh"):
        Path(folder).mkdir()
        Path(folder, "config.yaml").write_text("precious")
    before = contents("conf") | contents(".ssh") | contents("runs/r")
    found = next(Path("downloads").iterdir())
    real = setup.make_run_dir

    def forged(plan: Any, stem: str) -> Path:
        plan.manifest["run_dir"] = name
        return real(plan, stem)

    monkeypatch.setattr(setup, "make_run_dir", forged)
    trainer = make(resume=str(found), max_steps=6)
    trainer.fit()
    assert trainer.run_dir.parent == Path("runs") and trainer.run_dir != Path("runs/r") and trainer.step == 6
    assert contents("conf") | contents(".ssh") | contents("runs/r") == before


def test_a_run_goes_on_where_its_checkpoints_are_a_link_or_are_saved_elsewhere_from_now_on():
    make(run_dir="runs/r").fit()
    Path("disk").mkdir()
    shutil.move("ckpt/r", "disk/of another name")
    os.symlink("../disk/of another name", "ckpt/r")
    for resume in ("ckpt/r", "ckpt/last.pt"):
        again = make(resume=resume, run_dir="runs/r", max_steps=6)
        again.fit()
        assert again.run_dir == Path("runs/r")
    again = make(resume="ckpt/r", max_steps=8)
    again.fit()
    assert again.run_dir == Path("runs/r")
    moved = make(resume="ckpt/r", max_steps=10, checkpoint={"dir": "big"})
    moved.fit()
    assert moved.run_dir == Path("runs/r") and list(Path("big/r").glob("step-*"))


def test_temporary_files_of_a_killed_process_are_swept():
    make(run_dir="runs/r").fit()
    Path("runs/r/export").mkdir()
    left = [Path("runs/r/.echelon-0123456789abcdef.tmp"), Path("runs/r/export/.tmpa1B2c3")]
    others = [Path("runs/r/.mine.tmp"), Path("runs/r/.tmpa1B2c3"), Path("runs/r/export/.tmpmine")]
    for path in (*left, *others):
        path.write_text("half")
    make(run_dir="runs/r", resume="auto", max_steps=6).fit()
    assert [path for path in (*left, *others) if path.exists()] == others


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_can_not_sync_a_folder(number, monkeypatch):
    real = os.fsync

    def fsync(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    make(run_dir="runs/r").fit()
    assert make(run_dir="runs/r", resume="auto", max_steps=6).plan.resumed


def lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an overlay's lower layer: a folder can't be renamed, unless this process has made it."""
    real, old = os.rename, {path.resolve() for path in Path("ckpt/r").iterdir() if path.is_dir()}

    def rename(source: Any, target: Any) -> None:
        if not Path(source).is_symlink() and Path(source).resolve() in old:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)


def test_checkpoints_in_an_images_layer_are_thinned_out_and_set_aside(monkeypatch):
    make(run_dir="runs/r", max_steps=8, checkpoint={"keep": 9}).fit()
    lower(monkeypatch)
    trainer = make(resume="ckpt/r/step-00000006", run_dir="runs/r", max_steps=10)
    trainer.fit()
    assert sorted(path.name for path in Path("ckpt/r").glob("step-*")) == ["step-00000008", "step-00000010"]
    assert len(list(Path("ckpt/r").glob(".abandoned-step-00000008-*"))) == 1
    assert not list(Path("ckpt/r").glob(".trash-*"))


def test_a_config_of_an_earlier_version_has_todays_names(tmp_path):
    old = "data:\n  workers: 0\n  lanes: 5\n  block: 4\nrecipe:\n  block: 3\ncallbacks:\n  bucket:\n    late: [a]\n"
    old += "trainer:\n  accept: [batch, lanes]\n  timeout_s: '1e3'\noptimizer:\n  lr: 1e-3\n"
    (tmp_path / "config.yaml").write_text(old)
    new = stored_config(tmp_path / "config.yaml").read()
    assert new.count("\n") == old.count("\n") and "timeout_s: '1e3'\noptimizer:\n  lr: 1e-3\n" in new
    assert yaml.safe_load(new) == {
        "data": {"workers": 0, "shuffle_shards": 5, "shuffle_window": 4},
        "recipe": {"block": 3},
        "callbacks": {"bucket": {"delayed": ["a"]}},
        "trainer": {"accept": ["batch", "shuffle_shards"], "timeout_s": "1e3"},
        "optimizer": {"lr": "1e-3"},
    }
