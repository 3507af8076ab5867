"""A real SLURM: a task a rank, a task a node, a job whose time ends, tasks that are killed."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import MAIN, MARK, QUICK, ROOT, TOY, Result, environment, lines, run
from support.faults import tidy
from support.slurm import Slurm, needs_slurm, wait_for

pytestmark = [needs_slurm, pytest.mark.usefixtures("looked_at")]
RUN = [*TOY, *QUICK, "+callbacks=[probe]", "batch=12", "data.workers=1", "trainer.max_steps=12"]
RUN += ["trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=4", "trainer.checkpoint.keep=9"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def without_slurm(devices: int, folder: Path) -> Path:
    """A run whose ranks one process starts."""
    assert run([*RUN, f"trainer.devices={devices}"], folder).code == 0
    return folder


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    return without_slurm(3, tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    return without_slurm(4, tmp_path_factory.mktemp("four"))


def srun(slurm: Slurm, cwd: Path, options: str, *typed: str) -> Result:
    result = run([*RUN, *typed], cwd, ["srun", *options.split(), *MAIN], **slurm.env)
    # srun's, where the test before has only just ended
    return result._replace(err=re.sub("srun: job .* (waiting for|allocated) resources\n", "", result.err))


def same(cwd: Path, golden: Path) -> None:
    for name in ("model", "optimizer"):
        file = f"ckpt/r/step-00000012/{name}.safetensors"
        assert (cwd / file).read_bytes() == (golden / file).read_bytes()
    assert lines(cwd / "runs" / "r") == lines(golden / "runs" / "r")
    tidy(cwd)


A_TASK_A_NODE = ["trainer.devices=2", "trainer.nodes=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "typed"),
    [
        ("-N1 -n3", []),
        ("-N3 -n3", ["trainer.nodes=3"]),
        ("-N1 -n1", ["trainer.devices=3"]),
    ],
    ids=["a task a rank", "on three nodes", "a task a node"],
)
def test_srun_gives_the_same_numbers(slurm, golden, tmp_path, options, typed):
    result = srun(slurm, tmp_path, options, *typed)
    assert (result.code, result.err) == (0, "")
    assert "3 rank(s) on cpu" in result.out
    same(tmp_path, golden)


@pytest.mark.slow
def test_a_task_a_node_on_two_nodes(slurm, four, tmp_path):
    result = srun(slurm, tmp_path, "-N2 -n2", *A_TASK_A_NODE)
    assert (result.code, result.err) == (0, "")
    assert "4 rank(s) on cpu" in result.out
    same(tmp_path, four)


@pytest.mark.slow
def test_a_rank_of_one_of_two_nodes_is_killed(slurm, tmp_path):
    """Told by its node; srun ends the other."""
    trouble = ["callbacks.probe.trouble=SIGKILL", "callbacks.probe.rank=3", "callbacks.probe.step=7"]
    result = srun(slurm, tmp_path, "-N2 -n2 -K", *A_TASK_A_NODE, *trouble)
    assert result.code in (128 + 9, 128 + 15), result.err  # srun's, of one of the nodes
    assert "echelon: rank 3 was killed by SIGKILL; its log: runs/r/logs/rank3.log" in result.err
    assert "Traceback" not in result.err, result.err
    assert (tmp_path / "ckpt" / "r" / "step-00000004").exists()


def test_tasks_that_do_not_divide(slurm, tmp_path):
    result = srun(slurm, tmp_path, "-N2 -n3 -K")
    assert result.code  # 78, or what has ended the others
    told = [line for line in result.err.splitlines() if line.startswith("echelon: ")]
    line = "echelon: srun: 3 tasks on 2 nodes are not the same number on each node; use --ntasks-per-node"
    assert set(told) == {line} and len(told) <= 2  # once a node, unless srun has ended the other node's tasks before


@pytest.mark.slow
def test_a_task_that_is_killed_ends_the_others(slurm, tmp_path):
    trouble = ["callbacks.probe.trouble=SIGKILL", "callbacks.probe.rank=1", "data.workers=0"]
    result = srun(slurm, tmp_path, "-N1 -n3 -K", *trouble)
    assert result.code in (128 + 9, 128 + 15)  # srun's, of one of the tasks
    assert re.findall(r"^srun: error: .*: task 1: Killed$", result.err, re.MULTILINE)
    assert "Traceback" not in result.err and "echelon:" not in result.err, result.err


def submit(slurm: Slurm, cwd: Path, options: str, *typed: str) -> str:
    """The job of scripts/cluster/slurm.sh."""
    script = str(ROOT / "scripts" / "cluster" / "slurm.sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(**{MARK: str(cwd)}, PATH=path, **slurm.env)
    words = ["sbatch", "--parsable", "--cpus-per-task=1", *options.split(), script, *RUN, *typed]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def show(slurm: Slurm, job: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in slurm.call("scontrol", "show", "job", job).split())


def log(cwd: Path) -> str:
    return "".join(path.read_text() for path in cwd.glob("slurm-*.log"))


def completed(slurm: Slurm, job: str, cwd: Path, timeout_s: float = 60) -> int:
    """How often it was started again."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_for(lambda: show(slurm, job)["JobState"] in over, "the job's end", timeout_s, said=lambda: log(cwd))
    assert show(slurm, job)["JobState"] == "COMPLETED", log(cwd)
    return int(show(slurm, job)["Restarts"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "typed", "straight"),
    [
        ("--ntasks-per-node=3", [], "golden"),
        ("--ntasks-per-node=1", ["trainer.devices=3"], "golden"),
        ("--nodes=2 --ntasks-per-node=1", A_TASK_A_NODE, "four"),
    ],
    ids=["a task a rank", "a task a node", "a task a node on two nodes"],
)
def test_a_job_that_gets_usr1_is_queued_again_and_goes_on(slurm, request, tmp_path, options, typed, straight):
    job = submit(slurm, tmp_path, options, "callbacks.probe.step_s=0.3", *typed)
    wait_for((tmp_path / "ckpt" / "r" / "step-00000004").exists, "a checkpoint", said=lambda: log(tmp_path))
    slurm.call("scancel", "-s", "USR1", job)
    assert completed(slurm, job, tmp_path) == 1
    said = log(tmp_path)
    assert said.count("SIGUSR1: stopping after this step with a checkpoint") == 1
    assert set(re.findall(r"^srun: error: .*: (.*)$", said, re.MULTILINE)) == {"Exited with exit code 75"}, said
    assert "Traceback" not in said
    assert len(re.findall(r"resumed from \S*ckpt/r/step-0", said)) == 1
    same(tmp_path, request.getfixturevalue(straight))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "typed"),
    [("--ntasks-per-node=3", []), ("--ntasks-per-node=1", ["trainer.devices=3"])],
    ids=["a task a rank", "a task a node"],
)
def test_a_job_that_gets_usr1_while_it_starts_is_queued_again_at_once(slurm, golden, tmp_path, options, typed):
    """Its data would take longer to prepare than the test may."""
    slow = ["callbacks.probe.trouble='sleep 3600'", "callbacks.probe.where=startup", "callbacks.probe.attempts=1"]
    job = submit(slurm, tmp_path, options, *slow, *typed)
    wait_for(lambda: show(slurm, job)["JobState"] == "RUNNING", "the job's start")
    time.sleep(6)  # its ranks wait for the first
    slurm.call("scancel", "-s", "USR1", job)
    assert completed(slurm, job, tmp_path) == 1
    said = log(tmp_path)
    assert said.count("echelon: SIGUSR1: stopped before the first step\n") == 1 and "Traceback" not in said, said
    same(tmp_path, golden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "typed"),
    [("--ntasks-per-node=3", []), ("--ntasks-per-node=1", ["trainer.devices=3"])],
    ids=["a task a rank", "a task a node"],
)
def test_a_job_that_is_cancelled_has_a_last_checkpoint(slurm, tmp_path, options, typed):
    """SIGTERM to every process of the job, and none of them has to be asked twice."""
    never = ["trainer.checkpoint.every_steps=null", "callbacks.probe.step_s=0.5", "data.workers=2"]
    job = submit(slurm, tmp_path, options, *never, *typed)
    wait_for((tmp_path / "runs" / "r" / "facts-0.json").exists, "a step", said=lambda: log(tmp_path))
    slurm.call("scancel", job)
    wait_for(lambda: show(slurm, job)["JobState"] == "CANCELLED", "the job's end", said=lambda: log(tmp_path))
    wait_for((tmp_path / "runs" / "r" / "summary.json").exists, "its end", said=lambda: log(tmp_path))
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert summary["stopped"] == "signal" and 1 <= summary["steps"] < 12
    assert (tmp_path / "ckpt" / "r" / f"step-{summary['steps']:08d}").exists()
    assert "Traceback" not in log(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_whose_time_ends(slurm, tmp_path):
    """SLURM looks after the time of jobs twice a minute, and tells up to a minute early."""
    longer = ["trainer.max_steps=45", "trainer.checkpoint.every_steps=null", "callbacks.probe.step_s=1"]
    job = submit(slurm, tmp_path, "--ntasks-per-node=3 --time=1 --signal=USR1@20", *longer)
    wait_for(lambda: show(slurm, job)["Restarts"] != "0", "the job's time to end", 150, said=lambda: log(tmp_path))
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert completed(slurm, job, tmp_path, 150) >= 1
    straight = tmp_path / "straight"
    straight.mkdir()
    assert run([*RUN, *longer, "callbacks.probe.step_s=0", "trainer.devices=3"], straight).code == 0
    file = "ckpt/r/step-00000045/model.safetensors"
    assert (tmp_path / file).read_bytes() == (straight / file).read_bytes()
