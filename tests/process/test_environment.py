"""Places: what the launchers of other systems set, and variables that are no numbers."""

import getpass
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import MAIN, QUICK, TOY, run
from support.messages import refuses

from trainer.errors import ConfigError
from trainer.process.environment import (
    Place,
    avoid_foreign_cache,
    cores,
    detect,
    first_host,
    forget_ranks,
    mark_rank,
    refuse_nodes,
    threads_of,
    variables,
)

ELASTIC = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_mpich():
    assert detect(MPICH | {"MASTER_ADDR": "a"}, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "mpirun")
    assert detect(MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}).world == 1
    with pytest.raises(
        ConfigError, match=r"^mpirun: 8 ranks need an address to meet at; .* -genv MASTER_ADDR <first host>"
    ):
        detect(dict(MPICH))


@pytest.mark.parametrize(("store", "launcher"), [("/tmp/store", "echelon"), ("", "srun")])
def test_a_rank_that_echelon_starts_finds_its_place(store, launcher):
    place = Place(5, 8, 1, 4, store)
    assert detect(variables(place, Path("/private"))) == replace(place, launcher=launcher)
    assert variables(place, Path("/private"))["ECHELON_ERROR_FILE"] == "/private/error-5.json"


def test_ranks_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (threads_of(1), threads_of(cores()), threads_of(10 * cores())) == (str(cores()), "1", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_of(3) == "7"


def test_an_unknown_launcher_is_refused_instead_of_training_many_times():
    with refuses("PMI_SIZE=3", "MPI"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "3"})
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    step |= {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a"}
    assert detect(step | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "srun"  # which sets these, too


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1")])
def test_a_variable_that_is_no_number_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={value}: is not a number"):
        detect({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | {name: value})


def test_the_limit_of_open_files_is_raised():
    code = "import resource; from trainer import main\n"
    code += "main.command = lambda words: print(*resource.getrlimit(resource.RLIMIT_NOFILE)) or 0; main.main()"
    words = ["sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh", sys.executable, "-c", code]
    soft, hard = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert soft == hard != "64"


def test_a_loopback_that_is_down_is_one_line(tmp_path):
    words = [*TOY, *QUICK, "trainer.devices=2", "trainer.accelerator=cpu"]
    down = run(words, tmp_path, ["unshare", "--net", *MAIN])
    if "unshare failed" in down.err or "Operation not permitted" in down.err:
        pytest.skip("no network namespace of our own")
    assert (down.code, down.err.count("\n")) == (78, 1) and "ip link set lo up" in down.err


def foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("not root: no folder of another user")
    path.mkdir()
    os.chown(path, 54322, 54322)


CACHED = """
import os, sys
from types import SimpleNamespace
from trainer import main

def start(*_):
    import torch._dynamo
    print(os.environ["TORCHINDUCTOR_CACHE_DIR"])

sys.modules["trainer.launch.launcher"] = SimpleNamespace(start=start)
config = {"trainer": {"devices": 1}, "callbacks": {}, "nccl": {}, "batch": 12, "micro_batch": None, "accumulate": None}
main.run(config, "toy", [])
"""


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere"), foreign])
def test_a_foreign_file_in_place_of_the_cache_of_compiled_code_is_passed_over(tmp_path: Path, make, monkeypatch):
    """In /tmp any user may take the name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make(tmp_path / f"torchinductor_{getpass.getuser()}")
    avoid_foreign_cache(env := {})
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/echelon-inductor-")


@pytest.mark.slow
def test_a_folder_in_place_of_a_foreign_cache_goes_with_the_process(tmp_path: Path):
    foreign(tmp_path / f"torchinductor_{getpass.getuser()}")
    env = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    words, env = [sys.executable, "-c", CACHED], env | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(words, env=env, capture_output=True, text=True)
    assert result.stdout.startswith(f"{tmp_path}/echelon-inductor-"), result.stderr
    assert len(list(tmp_path.iterdir())) == 1


def test_the_usual_cache_of_compiled_code_stays(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    avoid_foreign_cache(env := {})
    (tmp_path / f"torchinductor_{getpass.getuser()}").mkdir()
    avoid_foreign_cache(env)
    assert env == {}


SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}


def mpi(rank: int, world: int, local_rank: int, local_world: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_world}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def test_nobody_started_us():
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert detect({}) == detect(job) == Place()  # sbatch
    assert detect(job | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}) == Place()  # salloc's shell
    assert detect({}, devices=4, nodes=2) == Place()
    assert (
        detect(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}) == Place()
    )  # srun --pty


def test_torchrun():
    assert detect(dict(ELASTIC)) == Place(5, 8, 1, 4, "", "torchrun")
    assert detect(ELASTIC | SLURM | mpi(0, 1, 0, 1), devices=4, nodes=2).launcher == "torchrun"  # inside of both
    assert detect({"RANK": "3", "WORLD_SIZE": "4"}, devices=1, nodes=4) == Place(3, 4, 0, 1, "", "torchrun")  # Kubeflow
    assert detect(ELASTIC | {"ECHELON_STORE": "/s"}) == Place(5, 8, 1, 4, "/s", "echelon")


def test_open_mpi(tmp_path):
    env = mpi(1, 2, 1, 2) | {"PMIX_SERVER_TMPDIR": str(tmp_path), "PMIX_NAMESPACE": "77"}
    assert detect(env) == Place(1, 2, 1, 2, f"{tmp_path}/echelon-77", "mpirun")
    assert detect(mpi(0, 1, 0, 1)) == Place(0, 1, 0, 1, "", "mpirun")
    assert detect(mpi(5, 8, 1, 4) | {"MASTER_ADDR": "gpu03"}, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "mpirun")
    assert detect(env | SLURM).launcher == "mpirun"  # mpirun inside of salloc
    for lost in (mpi(5, 8, 1, 4) | {"PMIX_SERVER_TMPDIR": str(tmp_path)}, mpi(1, 2, 1, 2)):
        with pytest.raises(ConfigError, match=r"mpirun: \d ranks .* need an address to meet at; .*-x MASTER_ADDR="):
            detect(lost)


def test_slurm():
    env = dict(SLURM)
    assert detect(env, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "srun")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu03", str(20000 + 4243))
    one_task_a_node = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert detect(SLURM | one_task_a_node) == Place(1, 2, 0, 1, "", "srun")
    assert detect(SLURM | one_task_a_node, devices=4, nodes=2) == Place(4, 8, 0, 4, "", "srun", starts=True)
    assert detect(ELASTIC | SLURM | one_task_a_node | {"ECHELON_STORE": ""}, 4, 2) == Place(5, 8, 1, 4, "", "srun")
    with refuses("srun with one task per node", "trainer.run_dir=runs/NAME"):
        refuse_nodes(Place(0, 8, 0, 4, "", "srun", starts=True), {}, 2, None, None)
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "5", "SLURM_STEP_TASKS_PER_NODE": "8"}
    assert detect(SLURM | one_node) == Place(5, 8, 5, 8, "", "srun")
    given = SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "1"}
    detect(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("other", "1")
    steps = [dict(SLURM), SLURM | {"SLURM_STEP_ID": "2"}]
    for step in steps:
        detect(step)
    assert steps[0]["MASTER_PORT"] != steps[1]["MASTER_PORT"]  # two at a time in one job
    for uneven in ({"SLURM_STEP_NUM_TASKS": "7"}, {"SLURM_STEP_TASKS_PER_NODE": "5,3"}):
        with pytest.raises(
            ConfigError, match=r"srun: \d tasks on 2 nodes are not the same number on each node; use --ntasks"
        ):
            detect(SLURM | uneven)


def lacking(name: str) -> dict[str, str]:
    return {key: value for key, value in SLURM.items() if key != name}


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "^OMPI_COMM_WORLD_SIZE: is not set, "),
        ({"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, "^PMI_SIZE: is not set, "),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"^SLURM_STEP_NUM_NODES: is not set, but other variables of its launcher "),
        (lacking("SLURM_STEP_ID"), "^SLURM_STEP_ID: is not set, "),
        (lacking("SLURM_PROCID"), "^SLURM_PROCID: is not set, "),
        (SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST is not set; "),
        (SLURM | {"SLURM_STEP_NUM_NODES": "0"}, "^srun: 8 tasks on 0 nodes "),
        (SLURM | {"SLURM_PROCID": "9"}, r"^SLURM_\*: this process is rank 9 of 8, and 1 of 4 on its node"),
        (ELASTIC | {"RANK": "8"}, "^RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: this process is rank 8 of 8, "),
        (ELASTIC | {"WORLD_SIZE": "0"}, "is rank 5 of 0, "),
        (ELASTIC | {"LOCAL_WORLD_SIZE": "0"}, "and 1 of 0 on its node"),
        (ELASTIC | {"LOCAL_RANK": "4"}, "and 4 of 4 on its node"),
        (mpi(2, 2, 0, 2) | {"MASTER_ADDR": "a"}, r"^OMPI_COMM_WORLD_\* or PMI_\*: .* rank 2 of 2"),
    ],
)
def test_variables_of_a_launcher_that_are_left_or_contradict_each_other_are_named(env, line):
    with pytest.raises(ConfigError, match=line):
        detect(dict(env))


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
    with refuses("trainer.devices=3", "rank(s)", "trainer.devices=4", "trainer.devices"):
        detect(dict(ELASTIC), devices=3)
    with refuses("trainer.nodes=4", "node(s)", "trainer.nodes"):
        detect(dict(ELASTIC), nodes=4)


def test_a_command_that_the_code_of_a_rank_starts_is_no_rank():
    """It would take the rank's place in the run's store, and wait for the others without end."""
    private = {f"ECHELON_{name}": "x" for name in ("HEARTBEAT", "ATTEMPT", "PARENT")}
    env = variables(Place(1, 2, 1, 2, "store", "echelon"), Path("private")) | private | {"ECHELON_TRACEBACK": "1"}
    mark_rank(env)
    forget_ranks(env)
    assert detect(env) == Place(1, 2, 1, 2, "store", "echelon")  # the rank itself
    env["ECHELON_RANK_PROCESS"] = str(os.getpid() + 1)  # of the parent
    forget_ranks(env)
    assert env == {"ECHELON_TRACEBACK": "1"}
