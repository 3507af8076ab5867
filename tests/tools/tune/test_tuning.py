"""Whole searches by the command, on real ranks: results, kills, failing trials, and what they leave."""

import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from support import configs
from support.cli import MAIN, MARK, ROOT, Result, environment, lines, popen, run
from support.network import Cluster, needs_cluster

from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.cost.workload import Choice
from trainer.errors import STOPPED
from trainer.process.environment import Place
from trainer.tools.cost_model.read import costs_of
from trainer.tools.tune.__main__ import UNCHANGED, USAGE, lead
from trainer.tools.tune.candidates import NOTHING
from trainer.tools.tune.configs import merge
from trainer.tools.tune.options import TuneOptions
from trainer.tools.tune.search import OVER, Tried
from trainer.tools.tune.team import TrialFailed
from trainer.tools.tune.trial import PHASES
from trainer.tools.tune.tuning import Tuning, outcome, profile_steps
from trainer.tools.tune.workload import outline

pytestmark = pytest.mark.timeout(900)
COMMAND = [sys.executable, "-m", "trainer.tools.tune"]
QUICK = ["tune.steps=8", "tune.warm=1", "tune.pairs=5", "tune.budget_s=240"]  # on a loaded machine too
BUSY_LINK = ["recipe.seconds=0.0", "recipe.width=192", "recipe.depth=4"]  # 600 kB of gradients
WAIT_S = 240  # of which a quiet machine needs 10
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
    def __init__(self, seconds: float = 0.02, fault: str = "", **knobs):
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
    return run(words(*more), folder, COMMAND, timeout_s=400, **variables(folder))


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
    deadline = time.monotonic() + WAIT_S
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes(folder)
    assert {path.name.partition("_")[0] for path in (folder / "tmp").iterdir()} <= {"torchinductor"}  # torch's cache
    left = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert left == {"slow.py", "conf", "tmp"}
    tuned = folder / "conf" / "tuned"
    assert sorted(path.name for path in tuned.iterdir()) == sorted(results)


def until(happened: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()  # a killed launcher's ranks would hold its pipes
            pytest.fail(str(process.communicate(timeout=WAIT_S)))
        time.sleep(0.02)


def wait_for(event: str, journal: Path, process: "subprocess.Popen[str]") -> None:
    until(lambda: journal.exists() and f'"event": "{event}"' in journal.read_text(), process)


@pytest.mark.slow
def test_a_killed_search_goes_on_and_its_result_is_used(folder: Path) -> None:
    journal = folder / "conf" / "tuned" / "slow.jsonl"
    with popen(words("trainer.devices=2"), folder, COMMAND, **{MARK: str(folder)} | variables(folder)) as killed:
        wait_for("trial", journal, killed)
        killed.send_signal(signal.SIGKILL)
    before = journal.read_text()
    result = tune(folder, "trainer.devices=2")
    assert result.code == 0, result
    assert "resumes after 1 trials" in result.out and journal.read_text().startswith(before)
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
    used = run(["--config-dir", "conf", "recipe=slow", *more], folder, command, timeout_s=WAIT_S, **variables(folder))
    assert used.code == 0 and OmegaConf.load(folder / "runs" / "r" / "config.yaml").data.workers == 2
    assert "+tuned: was measured on another machine (ranks 2 there, 1 here" in used.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"), [("memory", "failed: rank 0: out of memory"), ("hang", "no end within 20 s")]
)
def test_trials_that_fail_are_lines_and_the_search_goes_on(fault: str, reason: str, folder: Path) -> None:
    result = tune(folder, "trainer.devices=3", f"recipe.fault={fault}", "tune.limit_s=20")
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
def test_a_job_is_resumed_with_the_result_by_the_printed_command(folder: Path) -> None:
    config, metrics = (folder / "runs" / "r" / name for name in ("config.yaml", "metrics.jsonl"))
    run_words = ["--config-dir", "conf", "recipe=slow", "trainer.devices=2", "trainer.max_steps=100000"]
    run_words += ["trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=20", "trainer.log_every_steps=1"]
    run_words += ["~callbacks.progress"]  # nobody reads what it prints
    with popen(run_words, folder, MAIN, **variables(folder)) as job:
        try:
            until(metrics.exists, job)
            new = "compile,overlap,pipeline"  # which a resume would refuse
            more = ["tune.apply=true", f"tune.without=[{new},shard,activation_checkpoint]"]
            result = tune(folder, "trainer.devices=2", "trainer.run_dir=runs/r", *more)
            stop, _, command = result.out.partition("\napply      ")[2].partition(", then: ")
            assert result.code == 0 and stop == "stop runs/r by SIGTERM", result
        finally:  # else a failed check would wait for the job without an end
            job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=WAIT_S)
    assert job.returncode == STOPPED, (out, err)
    taken = metrics.read_text().count("\n")
    resumed = shlex.split(command)
    resumed = resumed[resumed.index("resume") :]
    with popen(resumed, folder, MAIN, **variables(folder)) as job:
        try:
            until(lambda: metrics.read_text().count("\n") > taken, job)
        finally:
            job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=WAIT_S)
    assert job.returncode == STOPPED and OmegaConf.load(config).data.workers == 2, (out, err)
    steps = [line["step"] for line in lines(folder / "runs" / "r") if "train/loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    left = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert left == {"slow.py", "conf", "tmp", "runs", "ckpt"}


@pytest.mark.slow
@needs_cluster
def test_lossy_callbacks_are_tried_where_the_link_is_slow(folder: Path) -> None:
    without = "tune.without=[compile,pipeline]"  # which would win
    with Cluster(2, "20mbit") as cluster:
        code, out = tune_on(cluster, folder, 1, "tune.lossy=true", "tune.bound=0.05", without, *BUSY_LINK)
    assert code == 0 and re.search(r"trial .* \+(grad_compress|local_sgd|onebit_adam)", out), out
    found = OmegaConf.load(folder / "conf" / "tuned" / "slow.yaml")
    assert {"grad_compress", "local_sgd", "onebit_adam"} & set(found.callbacks), out
    assert "the loss is " in out and "(limit +5.00%: tune.bound)" in out


@pytest.mark.slow
@needs_cluster
def test_a_link_that_is_slowed_behind_its_back_is_noticed(folder: Path) -> None:
    """The links are measured while they are fast. Then they are slow, as the search goes on by its journal."""
    journal = folder / "conf" / "tuned" / "slow.jsonl"
    with Cluster(2, "1gbit") as cluster:
        tune_on(cluster, folder, 2, "tune.budget_s=1", *BUSY_LINK)
        kept = [line for line in journal.read_text().splitlines() if json.loads(line)["event"] in ("begin", "links")]
        journal.write_text("\n".join(kept) + "\n")
        cluster.shape("40mbit")
        code, out = tune_on(cluster, folder, 2, *BUSY_LINK)
    assert code in (0, 77) and len(kept) == 2, out
    corrected = re.search(r"corrected .*the link across: ([\d.]+) times the time that was measured", out)
    assert corrected and float(corrected[1]) > 3, out
    misses = [abs(float(miss)) for miss in re.findall(r"measured \(([-+][\d.]+)%\)", out)]
    assert misses[0] > 50 and misses[-1] < misses[0], out  # of today's config, of the last trial


def tune_on(cluster: Cluster, folder: Path, ranks_per_host: int, *more: str) -> tuple[int, str]:
    """Run the command on the ranks of a cluster."""
    with (folder / "tmp" / "out").open("w+") as out:
        command = [*COMMAND, *words(*more)]
        codes = cluster.run(command, ranks_per_host, environment(**variables(folder)), cwd=folder, stdout=out)
        out.seek(0)
        return codes[0], out.read()


@pytest.mark.slow
def test_a_signal_ends_the_search_and_leaves_its_journal(folder: Path) -> None:
    journal = folder / "conf" / "tuned" / "slow.jsonl"
    with popen(words("trainer.devices=2"), folder, COMMAND, **{MARK: str(folder)} | variables(folder)) as process:
        wait_for("today", journal, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM, (out, err)
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
    for field in dataclasses.fields(TuneOptions):
        default = getattr(TuneOptions(), field.name)
        shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), default)
        assert f"tune.{field.name}={shown}" in USAGE


def test_a_budget_that_is_over_names_one_that_is_enough_and_keeps_the_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Short:
        why, cost_s, canary_s, elapsed_s, today, options = OVER, 2.0, 880.0, 10.0, {"step_s": 4.0}, TuneOptions()

        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> tuple[Choice, None, None, list[str]]:
            return NOTHING, None, None, []

    monkeypatch.setattr("trainer.tools.tune.tuning.Tuning", Short)
    config = {"trainer": {"resume": None}}
    assert lead(SimpleNamespace(place=Place()), config, TuneOptions(), tmp_path, "mine", []) == UNCHANGED
    said = "today's config stays: the budget is over; the search resumes from its journal with tune.budget_s=1320"
    assert said in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "tuned" / "mine.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["begin", "start"]  # no verdict, which would end the journal


@pytest.fixture
def toy_config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    folder = ROOT / "tests" / "toy" / "conf"
    return compose(["--config-dir", str(folder), "recipe=toy"], [CONF, folder])[0].config


class Answers:
    """A team whose ranks answer at once: a step takes 1 s, and half of that without micro-batches."""

    def __init__(self, folder: Path, kills_at: int = 99, short: bool = False, batch_norm: bool = False) -> None:
        self.place, self.folder, self.kills_at, self.short = Place(0, 2, 0, 1), folder, kills_at, short
        self.batch_norm = batch_norm
        self.kinds: list[str] = []

    def outline(self, config: dict[str, Any]) -> dict[str, Any]:
        return outline(config)

    def run(self, task: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        self.kinds.append(task["kind"])
        if len(self.kinds) > self.kills_at:
            raise KeyboardInterrupt
        return [getattr(self, task["kind"])(task["config"])] * 2

    def links(self, config: dict[str, Any]) -> dict[str, Any]:
        levels = {"across": [1e-4, 1e8, 0.0, 1.0, 1.0]}
        return {"levels": levels, "codecs": {}, "cores": 1.0, "memory_bytes": None, "gpu": None, "backend": "gloo"}

    def profile(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.short:
            raise TrialFailed("rank 0: out of memory")
        work = {"parameters": [256], "shapes": [[16, 16]], "compute": [1.0], "parts": [], "part_of": []}
        work |= {
            "forward_s": 0.01,
            "backward_s": 0.02,
            "pass_s": 0.4,
            "optimizer_s": 0.01,
            "other_s": 0.0,
            "data_s": 0.0,
            "data_cpu": 1.0,
        }
        work |= {"activation_bytes": 8.0, "state_bytes": 4096.0, "boundary_bytes": 0.0, "step_s": 1.0}
        failed = ["micro_batch=1: ValueError: one value"] if self.batch_norm else []
        return work | {"random": False, "blocks": 0, "batch_norm": self.batch_norm, "failed": failed}

    def trial(self, config: dict[str, Any]) -> dict[str, Any]:
        step_s = 0.5 if config["micro_batch"] == 6 else 1.0
        phases = {**dict.fromkeys(PHASES, 0.0), "step": step_s, "forward": 0.3 * step_s, "backward": 0.7 * step_s}
        shown = {
            "losses": [2.0, 1.0],
            "precision": "fp32",
            "memory_bytes": 1.0,
            "advice": [],
            "phases": phases,
            "spread_s": 0.0,
        }
        return {"times": [step_s] * 2, **shown}


def test_a_search_on_ranks_that_answer_at_once_and_one_that_is_killed(
    toy_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**toy_config, "batch": 12, "micro_batch": 3}
    options = TuneOptions(steps=2, without=["compile", "overlap", "shard", "activation_checkpoint"])
    with pytest.raises(KeyboardInterrupt):
        lead(Answers(tmp_path, kills_at=6), config, options, tmp_path, "mine", [])
    lines = (tmp_path / "tuned" / "mine.jsonl").read_text()
    events = [json.loads(line)["event"] for line in lines.splitlines()]
    assert events == ["begin", "start", "today", "links", "profile", "trial", "pair"]
    other = json.dumps({**json.loads(lines.splitlines()[-1]), "choice": "another"})  # of a winner that was beaten since
    (tmp_path / "tuned" / "mine.jsonl").write_text(f"{lines}{other}\n")
    team = Answers(tmp_path)
    assert lead(team, config, options, tmp_path, "mine", ["batch=12", "++micro_batch=3"]) == 0
    assert (tmp_path / "tuned" / "mine.jsonl").read_text().startswith(lines) and team.kinds == ["trial"] * 8
    found = OmegaConf.load(tmp_path / "tuned" / "mine.yaml")
    assert found.micro_batch == 6 and found.tuned.ranks == 2
    said = capsys.readouterr().out
    assert "resumes after 1 trials" in said and "in 5 of 5 pairs" in said and "use it by +tuned=mine" in said
    assert "without ++micro_batch=3\n" in said  # which would win over the result


def test_with_batch_norm_another_micro_batch_is_no_exact_choice(
    toy_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**toy_config, "batch": 12, "micro_batch": 3}
    options = TuneOptions(steps=2, without=["compile", "overlap", "shard", "activation_checkpoint"])
    assert lead(Answers(tmp_path, batch_norm=True), config, options, tmp_path, "mine", []) == UNCHANGED
    said = capsys.readouterr().out
    assert said.count("passes     without one that fails: micro_batch=1: ValueError: one value\n") == 1
    assert (
        "choices    no other micro-batch, since it changes BatchNorm's numbers" in said and " micro_batch=6" not in said
    )


def test_trials_have_whole_periods_also_of_today_s_local_sgd() -> None:
    tuning = object.__new__(Tuning)
    tuning.options = TuneOptions(steps=20, warm=3)
    tuning.config = {"callbacks": {"local_sgd": {"every": 16}}, "trainer": {"max_steps": None, "allow_targets": []}}
    assert tuning.length(NOTHING) == (16, 32) and tuning.length(Choice({"local_sgd": {"every": 4}}, {})) == (4, 20)
    tuning.config["trainer"]["max_steps"] = 40
    assert tuning.length(NOTHING) == (16, 16)
    tuning.config["trainer"]["max_steps"] = 30
    with pytest.raises(TrialFailed, match=r"leaves 14 step\(s\) to time, .* every 16; give a smaller tune\.warm"):
        tuning.run_trial(NOTHING)


def test_a_profile_has_ten_steps_or_half_of_the_trials_unless_they_are_slow() -> None:
    options = TuneOptions(steps=40, limit_s=300)
    assert [profile_steps(options, step_s) for step_s in (0.1, 7.5, 10.0, 25.0, 60.0)] == [20, 20, 15, 6, 5]
    assert profile_steps(TuneOptions(steps=6, limit_s=300), 0.1) == 10


def test_a_trial_whose_loss_is_too_large_counts_for_nothing() -> None:
    tuning = object.__new__(Tuning)
    tuning.config = {"callbacks": {}, "trainer": {"allow_targets": []}, "batch": 4, "micro_batch": 1}
    tuning.options, tuning.batch_norm, tuning.place = TuneOptions(bound=0.05), False, Place()
    tuning.today = {"losses": [1.0 / (step + 1) for step in range(10)]}
    lossy = Choice({"grad_compress": {"codec": "int8"}}, {})
    assert 1.0 <= tuning._slowdown(lossy, [1.01 / (step + 1) for step in range(10)]) < 1.5
    assert tuning._slowdown(lossy, [1.1 / (step + 1) for step in range(10)]) == math.inf
    larger = Choice({}, {"micro_batch": 2})
    assert tuning._slowdown(NOTHING, [9.0] * 10) == tuning._slowdown(larger, [9.0] * 10) == 1.0  # of the canary
    tuning.batch_norm = True
    assert tuning._slowdown(larger, [9.0] * 10) == math.inf
    tried = Tried(lossy, 0.1, 0.1, math.inf)
    assert outcome(tried).endswith("measured (+0.0%), and its loss is too large: tune.bound")


def test_a_model_that_a_rank_alone_can_not_run_has_the_passes_of_todays_run(
    toy_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**toy_config, "batch": 12, "micro_batch": 3}
    options = TuneOptions(steps=2, without=["compile", "activation_checkpoint"])
    assert lead(Answers(tmp_path, short=True), config, options, tmp_path, "mine", []) in (0, UNCHANGED)
    said = capsys.readouterr().out
    assert "since a rank alone can't run the whole model: rank 0: out of memory" in said
    assert "measured   50 + 117 ms a sample, 8 parameters" in said and "search     " in said


def test_a_restart_with_the_budget_that_was_named_has_time_for_trials(
    toy_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**toy_config, "batch": 12, "micro_batch": 3}
    options = TuneOptions(steps=2, budget_s=1.0, without=["compile", "overlap", "shard", "activation_checkpoint"])
    assert lead(Answers(tmp_path), config, options, tmp_path, "mine", []) == UNCHANGED
    said = capsys.readouterr().out
    named = re.search(r"the budget is over; .* from its journal with tune.budget_s=(\d+)", said)
    assert named
    again = dataclasses.replace(options, budget_s=float(named[1]))
    assert lead(Answers(tmp_path), config, again, tmp_path, "mine", []) == 0
    assert "trial 1 " in capsys.readouterr().out


def test_a_codec_from_elsewhere_keeps_its_permission_in_every_choice() -> None:
    tuning = object.__new__(Tuning)
    codec = {"_target_": "outside.ternary.Ternary", "threshold": 0.5}
    config = merge(configs.toy_config(), Choice({"grad_compress": {"codec": codec}}, {}))
    config["trainer"]["allow_targets"] += ["outside"]
    tuning.config, tuning.place, tuning.cuda, tuning.wholes = config, Place(0, 2, 0, 2), False, {}
    choice = tuning._whole(Choice({}, {"data.workers": 0}))
    assert choice.allow[-1] == "outside" and choice.settings["data.workers"] == 0
    assert costs_of(choice.callbacks, choice.allow)["grad_compress"] is not None


def test_a_choice_of_the_journal_is_the_choice() -> None:
    choice = Choice({"overlap": {}}, {"micro_batch": 2}, ("mine",))
    assert Choice(**json.loads(json.dumps(asdict(choice)))) == choice
