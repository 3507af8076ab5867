"""Ranks, whoever starts them: torchrun, Open MPI, SLURM, or our own supervisor; and how they end when one fails."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import MAIN, QUICK, TOY, Result, lines, popen, run, toy, weights

from trainer.errors import ConfigError
from trainer.launch import Place, detect, first_host

SHORT = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.max_steps=5", "trainer.validate_every=3"]
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}


def mpi(rank: int, world: int, local_rank: int, local_world: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_world}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def test_nobody_started_us():
    assert detect({}) == detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Place()  # sbatch
    assert detect({}, devices=4, nodes=2) == Place()
    assert detect(SLURM | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}) == Place()  # srun --pty


def test_torchrun():
    assert detect(dict(TORCHRUN)) == Place(5, 8, 1, 4, "", "torchrun")
    assert detect(TORCHRUN | SLURM | mpi(0, 1, 0, 1), devices=4, nodes=2).launcher == "torchrun"  # inside of both
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == Place(0, 1, 0, 1, "", "torchrun")  # as Kubeflow sets them
    assert detect(TORCHRUN | {"ECHELON_STORE": "/s"}) == Place(5, 8, 1, 4, "/s", "echelon")


def test_open_mpi(tmp_path):
    env = mpi(1, 2, 1, 2) | {"PMIX_SERVER_TMPDIR": str(tmp_path), "PMIX_NAMESPACE": "77"}
    assert detect(env) == Place(1, 2, 1, 2, f"{tmp_path}/echelon-77", "mpirun")
    assert detect(mpi(0, 1, 0, 1)) == Place(0, 1, 0, 1, "", "mpirun")
    assert detect(mpi(5, 8, 1, 4) | {"MASTER_ADDR": "gpu03"}, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "mpirun")
    assert detect(env | SLURM).launcher == "mpirun"  # mpirun inside of salloc
    for lost in (mpi(5, 8, 1, 4) | {"PMIX_SERVER_TMPDIR": str(tmp_path)}, mpi(1, 2, 1, 2)):
        with pytest.raises(ConfigError, match=r"mpirun: \d ranks .* need a meeting point; .*-x MASTER_ADDR="):
            detect(lost)


def test_slurm():
    env = dict(SLURM)
    assert detect(env, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "srun")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu03", str(20000 + 4243))
    one_task_a_node = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert detect(SLURM | one_task_a_node) == Place(1, 2, 0, 1, "", "srun")
    one_node = {"SLURM_NNODES": "1", "SLURM_LOCALID": "5", "SLURM_STEP_TASKS_PER_NODE": "8"}
    assert detect(SLURM | one_node) == Place(5, 8, 5, 8, "", "srun")
    given = SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "1"}
    detect(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("other", "1")
    steps = [dict(SLURM), SLURM | {"SLURM_STEP_ID": "2"}]
    for step in steps:
        detect(step)
    assert steps[0]["MASTER_PORT"] != steps[1]["MASTER_PORT"]  # two at a time in one job
    for uneven in ({"SLURM_NTASKS": "7"}, {"SLURM_STEP_TASKS_PER_NODE": "5,3"}):
        with pytest.raises(ConfigError, match=r"srun: \d tasks on 2 nodes are not the same number on each; use --ntasks"):
            detect(SLURM | uneven)


@pytest.mark.parametrize(
    ("nodes", "first"),
    {
        "gpu03": "gpu03",
        "gpu03,cpu1": "gpu03",
        "gpu[03-05,9],cpu1": "gpu03",
        "gpu[7,9]": "gpu7",
        "cpu1,gpu[03-05]": "cpu1",
        "rack[1-2]n[03-04].site,x": "rack1n03.site",
        "a-b[10-12]-ib": "a-b10-ib",
    }.items(),
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_settings_that_contradict_the_launcher():
    with pytest.raises(ConfigError, match=r"trainer\.devices=3: torchrun started 4 rank\(s\) on this node; use trainer\.devices=4"):
        detect(dict(TORCHRUN), devices=3)
    with pytest.raises(ConfigError, match=r"trainer\.nodes=4: torchrun started 8 ranks on 2 node\(s\); leave trainer\.nodes out"):
        detect(dict(TORCHRUN), nodes=4)


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
    assert [(rank["world"], rank["initialized"], rank["model"]) for rank in ranks] == [(2, True, "DistributedDataParallel")] * 2
    assert len({rank["pid"] for rank in ranks}) == 2 and len({rank["parent"] for rank in ranks}) == 1
    assert not [rank["pid"] for rank in ranks if Path(f"/proc/{rank['pid']}").exists()]


def test_nothing_listens_but_on_loopback(two):
    assert {address for rank in facts(two / "runs" / "r") for address in rank["listening"]} == {"0100007F"}


def test_with_one_rank_nothing_distributed_is_started(two, tmp_path):
    result = run([*SHORT, "trainer.run_dir=runs/r"], tmp_path)
    assert result.code == 0, result.err
    (rank,) = facts(tmp_path / "runs" / "r")
    assert (rank["world"], rank["initialized"], rank["model"], rank["listening"]) == (1, False, "Net", [])
    close = [{key: pytest.approx(value, rel=1e-5) for key, value in line.items()} for line in lines(two / "runs" / "r")]
    assert lines(tmp_path / "runs" / "r") == close


def same(cwd: Path, two: Path) -> None:
    assert lines(cwd / "runs" / "r") == lines(two / "runs" / "r")
    assert weights("r", cwd, 5) == weights("r", two, 5)


def test_torchrun_gives_the_same_numbers(two, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer.main"]
    result = run([*SHORT, "trainer.run_dir=runs/r"], tmp_path, launcher)
    assert result.code == 0, result.err
    same(tmp_path, two)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_mpirun_gives_the_same_numbers(two, tmp_path):
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *MAIN]
    result = run([*SHORT, "trainer.run_dir=runs/r"], tmp_path, launcher)
    assert result.code == 0, result.err
    assert "step 5/5" in result.out and "\x1b" not in result.out
    same(tmp_path, two)
    assert {address for rank in facts(tmp_path / "runs" / "r") for address in rank["listening"]} == {"0100007F"}
