"""`new NAME` writes a recipe that trains by the printed command, and overwrites nothing."""

import json
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from support.cli import ROOT, run
from support.messages import refuses

from trainer.errors import ConfigError
from trainer.tools.new import new


def test_the_printed_commands_work(tmp_path, monkeypatch):
    done = run(["my_task"], tmp_path, "trainer.tools.new", loaded=("trainer.main",))
    assert done.code == 0, done.err
    *files, gap, trains, tests = done.out.splitlines()
    assert files == ["my_task.py", "conf/recipe/my_task.yaml", "test_my_task.py"] and not gap
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(files)
    words = shlex.split(trains.partition(" #")[0])
    assert words[0].endswith("echelon") or words[1:3] == ["-m", "trainer.main"]
    done = run(
        words[words.index("--config-dir") :], tmp_path, PYTHONPATH=str(ROOT)
    )  # the recipe is in the current folder
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5 * 4096 // 64 and summary["val/accuracy"] > 0.95
    assert shlex.split(tests)[1:] == ["-m", "pytest", "test_my_task.py"]
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path(str(tmp_path / "test_my_task.py"))["test_it_learns_a_batch"]()
    del sys.modules["my_task"]


@pytest.mark.parametrize("file", ["my_task.py", "conf/recipe/my_task.yaml", "test_my_task.py"])
def test_nothing_is_overwritten(tmp_path, file):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("mine")
    with pytest.raises(ConfigError, match=f"NAME=my_task: {file} is there already, and is not overwritten"):
        new("my_task")
    assert [path for path in Path().rglob("*") if path.is_file()] == [Path(file)] and Path(file).read_text() == "mine"


@pytest.mark.parametrize(
    "name, told",
    [
        ("my-task", "is not a valid recipe name"),
        ("../x", "is not a valid recipe name"),
        ("Task", "is not a valid recipe name"),
        ("class", "is not a valid recipe name"),
        ("_", "is not a valid recipe name"),
        ("_1", "is not a valid recipe name"),
        ("points", "Points has a meaning of its own in the files"),
        ("true", "True has a meaning of its own in the files"),
        ("null", "Null has a meaning of its own in the files"),
        ("json", "is the name of a package in this environment"),
        ("torch", "is the name of a package in this environment"),
        ("bert_tiny", "is a recipe of Echelon's"),
    ],
)
def test_names_that_are_refused(tmp_path, monkeypatch, name, told):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=f"NAME={name}: {told}; give "):
        new(name)
    assert not os.listdir()


def test_a_folder_that_refuses(tmp_path):
    (tmp_path / "conf").touch()  # root may write into any folder
    with refuses("NAME=my_task", "conf/recipe", "directory"):
        new("my_task")
