"""A real SLURM: a task a rank, a task a node, a job whose time ends, tasks that are killed."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import MAIN, QUICK, ROOT, TOY, Result, environment, lines, run
from slurm import Slurm, needs_slurm, wait_for

pytestmark = needs_slurm
RUN = [*TOY, *QUICK, "+callbacks=[probe]", "batch=12", "data.workers=1", "trainer.max_steps=12"]
RUN += ["trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=4", "trainer.checkpoint.keep=9"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    """A run of three ranks from one process, without SLURM."""
    folder = tmp_path_factory.mktemp("golden")
    assert run([*RUN, "trainer.devices=3"], folder).code == 0
    return folder


def srun(slurm: Slurm, cwd: Path, options: str, *typed: str) -> Result:
    return run([*RUN, *typed], cwd, ["srun", *options.split(), *MAIN], **slurm.env)


def same(cwd: Path, golden: Path) -> None:
    for name in ("model", "optimizer"):
        file = f"ckpt/r/step-00000012/{name}.safetensors"
        assert (cwd / file).read_bytes() == (golden / file).read_bytes()
    assert lines(cwd / "runs" / "r") == lines(golden / "runs" / "r")


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


def test_tasks_that_do_not_divide(slurm, tmp_path):
    result = srun(slurm, tmp_path, "-N2 -n3 -K")
    assert result.code  # 78, or what has ended the others
    told = [line for line in result.err.splitlines() if line.startswith("echelon: ")]
    assert told == ["echelon: srun: 3 tasks on 2 nodes are not the same number on each; use --ntasks-per-node"]


def test_a_task_that_is_killed_ends_the_others(slurm, tmp_path):
    trouble = ["callbacks.probe.trouble=SIGKILL", "callbacks.probe.rank=1", "data.workers=0"]
    result = srun(slurm, tmp_path, "-N1 -n3 -K", *trouble)
    assert result.code in (128 + 9, 128 + 15)  # srun's, of one of the tasks
    assert re.findall(r"^srun: error: .*: task 1: Killed$", result.err, re.MULTILINE)
    assert "Traceback" not in result.err and "echelon:" not in result.err, result.err


def submit(slurm: Slurm, cwd: Path, options: str, *typed: str) -> str:
    """The job of scripts/cluster/slurm.sh."""
    script = str(ROOT / "scripts" / "cluster" / "slurm.sh")
    env = environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **slurm.env)
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


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        ("--ntasks-per-node=3", []),
        pytest.param("--ntasks-per-node=1", ["trainer.devices=3"], marks=pytest.mark.faults),
    ],
    ids=["a task a rank", "a task a node"],
)
def test_a_job_that_gets_usr1_is_queued_again_and_goes_on(slurm, golden, tmp_path, options, typed):
    job = submit(slurm, tmp_path, options, "callbacks.probe.step_s=0.3", *typed)
    wait_for((tmp_path / "ckpt" / "r" / "step-00000004").exists, "a checkpoint", said=lambda: log(tmp_path))
    slurm.call("scancel", "-s", "USR1", job)
    assert completed(slurm, job, tmp_path) == 1
    said = log(tmp_path)
    assert said.count("SIGUSR1: stopping after this step with a checkpoint") == 1
    assert set(re.findall(r"^srun: error: .*: (.*)$", said, re.MULTILINE)) == {"Exited with exit code 75"}, said
    assert "Traceback" not in said
    assert len(re.findall(r"resumed from \S*ckpt/r/step-0", said)) == 1
    same(tmp_path, golden)


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_job_whose_time_ends(slurm, tmp_path):
    """SLURM looks after the time of jobs twice a minute, and tells up to a minute early."""
    longer = ["trainer.max_steps=45", "trainer.checkpoint.every_steps=null", "callbacks.probe.step_s=1"]
    job = submit(slurm, tmp_path, "--ntasks-per-node=3 --time=1 --signal=USR1@20", *longer)
    assert completed(slurm, job, tmp_path, 300) >= 1
    straight = tmp_path / "straight"
    straight.mkdir()
    assert run([*RUN, *longer, "callbacks.probe.step_s=0", "trainer.devices=3"], straight).code == 0
    file = "ckpt/r/step-00000045/model.safetensors"
    assert (tmp_path / file).read_bytes() == (straight / file).read_bytes()
