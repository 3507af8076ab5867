"""Ranks, whoever starts them: torchrun, Open MPI, SLURM, or our own supervisor; and how they end when one fails."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import LOADED, MAIN, QUICK, TOY, Result, lines, popen, run, weights

from trainer.errors import ConfigError
from trainer.launch import launcher
from trainer.process.environment import Place

SHORT = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.max_steps=5", "trainer.validate_every=3"]
TORCHRUN = ["--standalone", "--nproc-per-node=2", "-m", "trainer.main"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *MAIN]
needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")


def torchrun(typed: list[str], cwd: Path, **env: str) -> Result:
    return run([*TORCHRUN, *typed], cwd, "torch.distributed.run", loaded=LOADED, **env)


def mpirun(typed: list[str], cwd: Path) -> Result:
    return run(typed, cwd, MPIRUN)


def two_devices(typed: list[str], cwd: Path, **env: str) -> Result:
    return run([*typed, "trainer.devices=2", "trainer.restarts=0"], cwd, **env)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A run on two ranks from one process."""
    cwd = tmp_path_factory.mktemp("two")
    result = run([*SHORT, "trainer.devices=2", "trainer.run_dir=runs/r"], cwd)
    assert result.code == 0, result.err
    return cwd


def facts(run_dir: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("facts-*.json"))]


def test_one_process_starts_the_ranks(two):
    ranks = facts(two / "runs" / "r")
    assert [(rank["world"], rank["initialized"], rank["model"]) for rank in ranks] == [
        (2, True, "DistributedDataParallel")
    ] * 2
    assert len({rank["pid"] for rank in ranks}) == 2 and len({rank["parent"] for rank in ranks}) == 1
    assert len({rank["drawn"] for rank in ranks}) == 2
    assert not [rank["pid"] for rank in ranks if Path(f"/proc/{rank['pid']}").exists()]


def test_nothing_listens_but_on_loopback(two):
    ranks = facts(two / "runs" / "r")
    assert on_loopback(ranks)
    assert not [address for rank in ranks for address in rank["parent listening"]]


def on_loopback(ranks: list[dict]) -> bool:
    addresses = {address for rank in ranks for address in rank["listening"]}
    return bool(addresses) and addresses <= {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1, ::1


def test_with_one_rank_nothing_distributed_is_started(two, tmp_path):
    result = run([*SHORT, "+callbacks=[probe,grad_compress,overlap]", "trainer.run_dir=runs/r"], tmp_path)
    assert result.code == 0, result.err
    assert result.out.count("one rank, nothing to communicate: grad_compress, overlap will do nothing\n") == 1
    (rank,) = facts(tmp_path / "runs" / "r")
    assert (rank["world"], rank["initialized"], rank["model"], rank["listening"]) == (1, False, "Net", [])
    close = [{key: pytest.approx(value, rel=1e-5) for key, value in line.items()} for line in lines(two / "runs" / "r")]
    assert lines(tmp_path / "runs" / "r") == close


def same(cwd: Path, two: Path) -> None:
    assert lines(cwd / "runs" / "r") == lines(two / "runs" / "r")
    assert weights("r", cwd, 5) == weights("r", two, 5)


@pytest.mark.slow
def test_torchrun_gives_the_same_numbers(two, tmp_path):
    result = torchrun([*SHORT, "trainer.run_dir=runs/r"], tmp_path)
    assert result.code == 0, result.err
    same(tmp_path, two)


@pytest.mark.slow
def test_the_launch_line_of_older_guides_gives_the_same_numbers(two, tmp_path):
    """It appends --local-rank to the arguments of each rank."""
    old = ["--standalone", "--nproc-per-node=2", "-m", "trainer.main", *SHORT, "trainer.run_dir=runs/r"]
    result = run(old, tmp_path, "torch.distributed.launch", loaded=LOADED)
    assert result.code == 0, result.err
    same(tmp_path, two)


@pytest.mark.slow
@needs_mpirun
def test_mpirun_gives_the_same_numbers(two, tmp_path):
    result = mpirun([*SHORT, "trainer.run_dir=runs/r"], tmp_path)
    assert result.code == 0, result.err
    assert "step 5/5" in result.out and "\x1b" not in result.out
    same(tmp_path, two)
    assert on_loopback(facts(tmp_path / "runs" / "r"))


def test_slurm_gives_the_same_numbers(two, tmp_path):
    """Two processes with what srun sets; test_slurm.py has srun itself."""
    with socket.socket() as probe:
        while True:
            port = 20000 + time.monotonic_ns() % 10000
            try:
                probe.bind(("127.0.0.1", port))
                break
            except OSError:
                continue
    step = {
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    tasks = [popen([*SHORT, "trainer.run_dir=runs/r"], tmp_path, **step, **rank) for rank in ranks]
    ended = [(*task.communicate(timeout=60), task.returncode) for task in tasks]
    assert [code for *_, code in ended] == [0, 0], ended
    same(tmp_path, two)


def trouble(what: str, rank: int, cwd: Path, *more: str, launch: Callable[..., Result] = two_devices, **env) -> Result:
    """A run of which a rank does `what` in step 3."""
    typed = [f"callbacks.probe.trouble={what}", f"callbacks.probe.rank={rank}", "trainer.max_steps=100000"]
    return launch([*SHORT, *typed, *more, "trainer.run_dir=runs/r"], cwd, **env)


def test_the_rank_that_failed_first_is_told_of(tmp_path):
    result = trouble("raise", 1, tmp_path)
    assert result.code == 1
    assert result.err.startswith("echelon: rank 1 failed first:\nTraceback")
    assert result.err.rstrip().endswith("RuntimeError: trouble at step 3")
    assert result.err.count("Traceback") == 1 and "gloo" not in result.err
    log = (tmp_path / "runs" / "r" / "logs" / "rank1.log").read_text()
    assert "about to make trouble" not in result.out and "step 2/100000" in result.out
    assert "about to make trouble" in log and "RuntimeError: trouble at step 3" in log


@pytest.mark.slow
@pytest.mark.parametrize("launch", [torchrun, pytest.param(mpirun, marks=needs_mpirun)])
def test_also_under_a_launcher(launch, tmp_path):
    result = trouble("raise", 1, tmp_path, launch=launch)
    assert result.code == 1
    first = result.err.rpartition("Root Cause")[2]  # torchrun's word
    assert "RuntimeError: trouble at step 3" in first and "gloo" not in first


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["batch=13"], "batch=13: does not divide into 2 rank(s)"),
        pytest.param(["+callbacks=[average,ema]"], "average and ema both decide", marks=pytest.mark.slow),
        # Rank 1's alone.
        pytest.param(
            ["trainer.backend='${oc.env:BACKEND_${oc.env:RANK}}'"],
            "trainer.backend=nccl: needs CUDA",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["before the ranks meet", "after", "of another rank"],
)
def test_an_error_of_all_ranks_is_one_line(typed, said, tmp_path):
    cpu = "trainer.accelerator=cpu"
    result = torchrun([*TOY, *QUICK, *typed, cpu], tmp_path, BACKEND_0="gloo", BACKEND_1="nccl")
    assert result.code == 1
    told = [line for line in (result.out + result.err).splitlines() if line.startswith("echelon: ")]
    assert len(told) == 1 and told[0].startswith(f"echelon: {said}"), result.err


def test_where_no_torchrun_prints_it_the_rank_does(tmp_path):
    """RANK and WORLD_SIZE by hand, or by Kubernetes."""
    result = trouble("raise", 0, tmp_path, launch=run, RANK="0", WORLD_SIZE="1")
    assert result.code == 1 and result.err.rstrip().endswith("RuntimeError: trouble at step 3")


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(tmp_path):
    result = trouble("SIGKILL", 1, tmp_path)
    assert result.code == 128 + 9
    assert result.err == "echelon: rank 1 was killed by SIGKILL; its log: runs/r/logs/rank1.log\n"
    (tmp_path / "saved").mkdir()
    again = trouble("SIGKILL", 1, tmp_path / "saved", "trainer.checkpoint.every_steps=2")
    told, _, command = again.err.partition("; resume with ")
    assert told == result.err.rstrip() and command.rstrip().endswith(" trainer.resume=ckpt/r")


def test_no_rank_outlives_its_launcher(tmp_path):
    (private := tmp_path / "tmp").mkdir()
    result = trouble("'parent SIGKILL'", 0, tmp_path, TMPDIR=str(private))  # waits for all that print
    assert result.code == -9
    left = [path for path in private.rglob("*") if path.is_file()]
    assert left and not [path for path in left if b"SIGKILL" in path.read_bytes()]  # nor any other part of the config
    ranks = facts(tmp_path / "runs" / "r")
    assert len(ranks) == 2
    deadline = time.monotonic() + 5
    while alive := [rank["pid"] for rank in ranks if running(rank["pid"])]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def start_under_mpirun(cwd: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    """It, and the ranks, once they have made a step."""
    process = popen([*SHORT, "trainer.max_steps=100000", "trainer.run_dir=runs/r"], cwd, MPIRUN)
    try:
        deadline = time.monotonic() + 60
        while len(ranks := facts(cwd / "runs" / "r")) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process, [rank["pid"] for rank in ranks]


@pytest.mark.slow
@needs_mpirun
def test_no_rank_outlives_mpirun(tmp_path):
    process, ranks = start_under_mpirun(tmp_path)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in ranks if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


@needs_mpirun
@pytest.mark.slow
def test_mpirun_passes_sigusr1_on(tmp_path):
    """But at SIGTERM it takes no more output, and kills its ranks after a second."""
    process, _ = start_under_mpirun(tmp_path)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "SIGUSR1: stopping after this step with a checkpoint" in out and "checkpoint  ckpt/r/step-" in out


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(launcher, "count_gpus", lambda accelerator: 2)
    with pytest.raises(
        ConfigError, match=r"^trainer\.devices=3: this node has 2 CUDA device\(s\); use trainer\.devices=2 or"
    ):
        launcher.start({"trainer": {"devices": 3}}, "run", [], Place())
