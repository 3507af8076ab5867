"""Whole searches by the command, on real ranks: results, kills, failing trials, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.cli import MARK, ROOT, Result, popen, run

from trainer.tools.tune.tuning import make_workload

COMMAND = [sys.executable, "-m", "trainer.tools.tune"]
QUICK = ["tune.steps=8", "tune.warm=1", "tune.pairs=5", "tune.budget_s=90"]
SLOW = """
import time
import torch
from toy_recipe import Toy

class Points:
    def __init__(self, points, seconds, fault):
        self.points, self.seconds, self.fault = points, seconds, fault
    def __len__(self):
        return len(self.points)
    def __getitem__(self, i):
        worker = torch.utils.data.get_worker_info()
        if worker and self.fault == "memory":
            raise MemoryError
        if worker and self.fault == "hang":
            time.sleep(1000)
        time.sleep(self.seconds)
        return self.points[i]

class Slow(Toy):
    def __init__(self, seconds: float = 0.008, fault: str = "", **knobs):
        super().__init__(**knobs)
        self.seconds, self.fault = seconds, fault
    def data(self, split):
        return Points(super().data(split), self.seconds, self.fault) if split == "train" else None
"""
RECIPE = """# @package _global_
recipe: {_target_: slow.Slow, samples: 960}
batch: 12
trainer: {max_steps: 100, allow_targets: [slow, toy_recipe], accelerator: cpu}
data: {workers: 0}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "slow.yaml").write_text(RECIPE)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def words(*more: str) -> list[str]:
    return ["--config-dir", "conf", "recipe=slow", *QUICK, *more]


def variables(folder: Path) -> dict[str, str]:
    paths = [str(folder), str(ROOT), str(ROOT / "tests" / "toy")]
    return {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder / "tmp")}


def tune(folder: Path, *more: str) -> Result:
    return run(words(*more), folder, COMMAND, timeout_s=200, **variables(folder))


def processes(folder: Path) -> list[str]:
    """Command lines of all processes that the search has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return [line for line in found if line]


def assert_tidy(folder: Path, *results: str) -> None:
    deadline = time.monotonic() + 10
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes(folder)
    assert {path.name.partition("_")[0] for path in (folder / "tmp").iterdir()} <= {"torchinductor"}  # torch's cache
    left = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert left == {"slow.py", "conf", "tmp"}
    tuned = folder / "conf" / "tuned"
    assert sorted(path.name for path in tuned.iterdir()) == sorted(results)


def wait_for(event: str, journal: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not (journal.exists() and f'"event": "{event}"' in journal.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_search_goes_on_and_its_result_is_used(folder: Path) -> None:
    journal = folder / "conf" / "tuned" / "slow.jsonl"
    with popen(words("trainer.devices=2"), folder, COMMAND, **{MARK: str(folder)} | variables(folder)) as killed:
        wait_for("trial", journal, killed)
        killed.send_signal(signal.SIGKILL)
    before = journal.read_text()
    result = tune(folder, "trainer.devices=2")
    assert result.code == 0, result
    assert "goes on after 1 trials" in result.out and journal.read_text().startswith(before)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert all(events.count(event) == 1 for event in ("begin", "today", "links", "profile", "verdict"))
    choices = [json.dumps(line["trial"]["choice"]) for line in lines if line["event"] == "trial"]
    assert len(choices) == len(set(choices))
    assert_tidy(folder, "slow.yaml", "slow.jsonl")
    found = OmegaConf.load(folder / "conf" / "tuned" / "slow.yaml")
    assert found.data.workers == 2 and found.tuned.ranks == 2 and found.tuned.gpu is None  # the data is what is slow
    command = [sys.executable, "-m", "trainer.main"]
    more = ["+tuned=slow", "trainer.max_steps=2", "trainer.run_dir=runs/r", "~callbacks.tensorboard"]
    used = run(["--config-dir", "conf", "recipe=slow", *more], folder, command, **variables(folder))
    assert used.code == 0 and OmegaConf.load(folder / "runs" / "r" / "config.yaml").data.workers == 2
    assert "+tuned: was measured on another machine (ranks 2 there, 1 here" in used.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"), [("memory", "failed: rank 0: out of memory"), ("hang", "no end within tune.limit_s=8")]
)
def test_trials_that_fail_are_lines_and_the_search_goes_on(fault: str, reason: str, folder: Path) -> None:
    result = tune(folder, "trainer.devices=3", f"recipe.fault={fault}", "tune.limit_s=8")
    assert result.code in (0, 77), result
    assert reason in result.out and "search     " in result.out and not result.err
    assert_tidy(folder, "slow.jsonl", *(["slow.yaml"] if not result.code else []))


@pytest.mark.slow
def test_one_rank(folder: Path) -> None:
    result = tune(folder)
    assert result.code == 0, result
    assert OmegaConf.load(folder / "conf" / "tuned" / "slow.yaml").data.workers == 2
    assert_tidy(folder, "slow.yaml", "slow.jsonl")


@pytest.mark.slow
def test_a_signal_ends_the_search_and_leaves_its_journal(folder: Path) -> None:
    journal = folder / "conf" / "tuned" / "slow.jsonl"
    with popen(words("trainer.devices=2"), folder, COMMAND, **{MARK: str(folder)} | variables(folder)) as process:
        wait_for("today", journal, process)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert_tidy(folder, "slow.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("tune.budget=3", "tune.budget=3: no such key; did you mean budget_s"),
        ("recipe.fault=3", "recipe.fault=3: must be str"),
        ("trainer.accelerator=cuda", "trainer.accelerator=cuda: torch sees no CUDA device"),
        ("recipe.samples=0", "today's config does not run: rank 0: "),
        ("-m", "-m: gives 2 runs, and tune takes one"),
    ],
)
def test_a_users_mistake_is_one_line(word: str, reason: str, folder: Path) -> None:
    more = [word, "batch=12,24"] if word == "-m" else [word]
    result = tune(folder, "trainer.devices=2", *more)
    assert result.code == 78 and result.err.count("\n") == 1, result
    assert result.err.startswith(f"echelon: {reason}")
    assert not (folder / "conf" / "tuned" / "slow.yaml").exists() and not list((folder / "tmp").iterdir())


def test_help_names_every_setting() -> None:
    from trainer.config.schema import option_parameters
    from trainer.tools.tune.__main__ import USAGE
    from trainer.tools.tune.options import TuneOptions

    for name, knob in option_parameters(TuneOptions).items():
        shown = {None: "null", True: "true", False: "false"}.get(knob.default, knob.default)
        assert f"tune.{name}={shown}" in USAGE


def test_the_slowest_rank_is_the_workload() -> None:
    one = {"parameters": [3], "shapes": [[3]], "forward_s": 1.0, "backward_s": 2.0, "pass_s": 0.1, "optimizer_s": 0.2}
    one |= {"other_s": 0.0, "data_s": 0.3, "activation_bytes": 5.0, "state_bytes": 6.0, "random": False}
    work = make_workload([one, {**one, "forward_s": 4.0}])
    assert (work.forward_s, work.backward_s, work.parameters, work.shapes) == (4.0, 2.0, (3,), ((3,),))
