"""An error in the user's code: the terminal shows the user's frames, the log of the rank has all of them."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.cli import Result, run
from support.quick import quick

from trainer.errors import fold, message

CONFIG = """\
# @package _global_
recipe: {_target_: mine.Mine, where: ""}
batch: 12
trainer: {max_steps: 4, run_dir: runs/r, restarts: 0, accelerator: cpu, allow_targets: [mine]}
data: {workers: 0}
"""
RECIPE = """\
import sys

import torch
from toy_recipe import Toy
from torch.utils.data import DataLoader, RandomSampler
from trainer.callback import Callback, Role


def fail(*_):
    raise KeyError("mine")


class Points(torch.utils.data.Dataset):
    def __init__(self, points, odd):
        self.points, self.odd = points, odd

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.odd() if i == 7 else self.points[i]


class Failing(Callback):
    role = Role.OBSERVE

    def on_step_end(self, trainer):
        fail()


class Mine(Toy):
    def __init__(self, where, rank=0):
        super().__init__()
        self.where, self.calls = where, 0
        if where in ("metrics", "transform", "collate"):
            setattr(self, where, lambda *both: fail(*both))

    def model(self):
        return fail() if self.where == "model" else super().model()

    def data(self, split):
        points = super().data(split)
        if self.where == "data set" or (self.where == "val" and split == "val"):
            return Points(points, fail)
        if self.where == "loader":
            points = Points(points, fail)
            return DataLoader(points, 12, sampler=RandomSampler(points), num_workers=1)
        if self.where == "None":
            return Points(points, lambda: None)
        return points

    def loss(self, model, batch):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.where == "exit":
            sys.exit(0)
        self.calls += model.training
        later = self.where == f"loss {rank} later" and self.calls == 4  # the second micro-batch of step 2
        return fail() if self.where == f"loss {rank}" or later else super().loss(model, batch)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(CONFIG)
    (tmp_path / "conf" / "callbacks").mkdir()
    (tmp_path / "conf" / "callbacks" / "failing.yaml").write_text("failing: {_target_: mine.Failing}")
    return tmp_path


def fail(folder: Path, where: str, *more: str, **env: str) -> Result:
    words = ["--config-dir", "conf", "recipe=mine", f"recipe.where={where}", "~callbacks.tensorboard"]
    return run([*words, *more], folder, **env)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs/r/summary.json").read_text())


def files(text: str) -> set[str]:
    return {Path(name).name for name in re.findall('File "(.*?)"', text)}


@pytest.mark.parametrize(
    "where", quick(["model", "loss 0", "transform", "", "metrics", "collate", "data set", "loader"], 2)
)
def test_the_terminal_shows_the_users_frames_and_counts_the_others(where, folder):
    failed = fail(folder, where, *([] if where else ["+callbacks=[failing]"]))
    assert failed.code == 1
    assert files(failed.err) == {"mine.py"}, failed.err
    assert failed.err.count("KeyError: 'mine'") == failed.err.count("ECHELON_TRACEBACK=1 shows them") == 1
    assert re.search(r"^  \.\.\. \d+ frame\(s\) of Echelon", failed.err, re.MULTILINE)
    assert len(failed.err.splitlines()) < 20, failed.err
    assert {"loop.py", "setup.py"} & files((folder / "runs/r/logs/rank0.log").read_text())
    assert summary(folder)["stopped"] == "error" and "KeyError: 'mine'" in summary(folder)["error"]


@pytest.mark.slow
def test_all_frames_on_demand(folder):
    failed = fail(folder, "loss 0", ECHELON_TRACEBACK="1")
    assert {"mine.py", "session.py", "main.py"} <= files(failed.err) and "ECHELON" not in failed.err


@pytest.mark.parametrize(
    ("where", "workers"), quick([("transform", 0), ("data set", 1), ("transform", 1), ("data set", 0)], 2)
)
def test_the_sample_is_named_from_a_worker_too(where, workers, folder):
    failed = fail(folder, where, f"data.workers={workers}")
    assert re.search(r"^trainer\.data\.source\.SampleFault: sample \d+: KeyError: 'mine'$", failed.err, re.MULTILINE)
    assert files(failed.err) == {"mine.py"}
    assert re.match(r"SampleFault: sample \d+: KeyError: 'mine'$", summary(folder)["error"])


def test_a_sample_that_is_none_is_one_line(folder):
    failed = fail(folder, "None", "data.workers=1")
    assert (failed.code, failed.err.count("\n")) == (78, 1)
    assert failed.err == "echelon: sample 7: is None; return the sample from the data set\n"


def test_an_error_in_the_loss_names_the_step_and_the_samples(folder):
    failed = fail(folder, "loss 0 later", "micro_batch=6")
    place = r"^KeyError: 'mine'\n  in step 2, on (sample \d+, ){4}sample \d+ and 1 more$"
    assert re.search(place, failed.err, re.MULTILINE), failed.err
    assert (summary(folder)["steps"], summary(folder)["error"]) == (1, "KeyError: 'mine'")


@pytest.mark.parametrize("where", ["metrics", "val"])
def test_an_error_in_validation_comes_before_step_1(where, folder):
    failed = fail(folder, where)
    assert "KeyError: 'mine'" in failed.err and failed.err.endswith("\n  in the trial of validation, before step 1\n")
    assert summary(folder)["steps"] == 0 and files(failed.err) == {"mine.py"}
    assert ("SampleFault: sample 7: " in summary(folder)["error"]) == (where == "val")


def test_an_exit_in_a_recipe_is_no_success(folder):
    failed = fail(folder, "exit")
    assert failed.code == 1 and files(failed.err) == {"mine.py"}
    assert "RuntimeError: sys.exit(0) was called in a run; raise an exception instead" in failed.err


@pytest.mark.parametrize("where", quick(["loss 1", "transform"]))
def test_the_rank_that_failed_first(where, folder):
    failed = fail(folder, where, "trainer.devices=2", "data.workers=1")
    assert re.match(r"echelon: rank \d failed first:\nTraceback", failed.err)
    assert files(failed.err) == {"mine.py"} and "KeyError: 'mine'" in failed.err
    assert re.match(r"rank \d: (SampleFault: sample \d+: )?KeyError: 'mine'$", summary(folder)["error"])
    if where == "loss 1":
        assert {"mine.py", "session.py"} <= files((folder / "runs/r/logs/rank1.log").read_text())
        assert r"/trainer/checks/recipe.py\"" in (folder / "runs/r/logs/events.jsonl").read_text()


def test_under_a_launcher_that_shows_no_errors(folder):
    failed = fail(folder, "loss 0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert failed.code == 1 and "mine.py" in files(failed.err) and "session.py" not in files(failed.err)


def test_a_syntax_error_of_the_users_is_shown(folder):
    (folder / "mine.py").write_text("def model(:\n")
    failed = fail(folder, "")
    assert failed.code == 1 and files(failed.err) == {"mine.py"} and "SyntaxError" in failed.err


def test_an_import_that_fails_in_a_users_module_is_one_line_with_its_place(folder):
    (folder / "mine.py").write_text("import os\nimport nowhere\n")
    failed = fail(folder, "")
    assert (failed.code, failed.err.count("\n")) == (78, 1)
    place = f"{folder}/mine.py:2: No module named 'nowhere'; install the package, or correct the import"
    assert failed.err == f"echelon: recipe._target_=mine.Mine: {place}\n"


def test_another_error_of_a_users_module_is_shown(folder):
    (folder / "mine.py").write_text("import os\nos.nowhere\n")
    failed = fail(folder, "")
    assert failed.code == 1 and files(failed.err) == {"mine.py"} and "AttributeError" in failed.err


def test_a_full_disk_without_a_name_may_be_that_of_shared_memory():
    told = message(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    folder = os.environ.get("TMPDIR", "/tmp")
    assert told.startswith(f"echelon: a file of the run, of {folder}, or of /dev/shm, which data workers need: No")


def test_an_error_of_ours_is_whole():
    import trainer.errors as module

    text = f'Traceback (most recent call last):\n  File "{module.__file__}", line 3, in f\n    g()\nKeyError: 1\n'
    assert fold(text) == text


def test_runs_of_frames_become_a_line_each():
    library = '  File "/env/lib/site-packages/torch/nn.py", line 1, in f\n    g()\n    ^^^\n'
    own = '  File "/own/mine.py", line 1, in f\n    g()\n'
    repeated = "  [Previous line repeated 900 more times]\n"
    folded = fold(f"Traceback:\n{library}{repeated}{library}{own}{repeated}{library}KeyError: 1\n")
    hint = " (ECHELON_TRACEBACK=1 shows them)"
    assert folded == (
        f"Traceback:\n  ... 2 frame(s) of torch{hint}\n{own}{repeated}  ... 1 frame(s) of torch\nKeyError: 1\n"
    )
    assert fold(folded) == folded
