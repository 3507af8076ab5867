"""Launchers that set PMI's variables, and variables that are no numbers."""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.process.environment import Place, avoid_foreign_cache, detect

MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_mpich():
    assert detect(MPICH | {"MASTER_ADDR": "a"}, devices=4, nodes=2) == Place(5, 8, 1, 4, "", "mpirun")
    assert detect(MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}).world == 1
    with pytest.raises(ConfigError, match=r"^mpirun: 8 ranks need a meeting point; .* -genv MASTER_ADDR <first host>"):
        detect(dict(MPICH))


def test_an_unknown_launcher_is_refused_instead_of_training_many_times():
    with pytest.raises(ConfigError, match=r"^PMI_SIZE=3: a launcher that Echelon doesn't know"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "3"})
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    step |= {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a"}
    assert detect(step | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "srun"  # which sets these, too


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1")])
def test_a_variable_that_is_no_number_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={value}: is no number"):
        detect({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | {name: value})


def test_the_limit_of_open_files_is_raised():
    code = "import resource; from trainer.process.environment import raise_file_limit; raise_file_limit(); "
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    words = ["sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh", sys.executable, "-c", code]
    soft, hard = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert soft == hard != "64"


def test_a_loopback_that_is_down_is_one_line():
    code = "from trainer.process.environment import refuse_without_loopback as f\n"
    code += "from trainer.process.exit import run_guarded; raise SystemExit(run_guarded(lambda: f() or 0))"
    alone = [sys.executable, "-c", code]
    assert subprocess.run(alone, capture_output=True, text=True, timeout=60).returncode == 0
    down = subprocess.run(["unshare", "--net", *alone], capture_output=True, text=True, timeout=60)
    if "unshare failed" in down.stderr or "Operation not permitted" in down.stderr:
        pytest.skip("no network namespace of our own")
    assert down.returncode == 78 and down.stderr.count("\n") == 1 and "ip link set lo up" in down.stderr


def foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("not root: no folder of another user")
    path.mkdir()
    os.chown(path, 54322, 54322)


CACHED = """
import os
from trainer.process.environment import avoid_foreign_cache
avoid_foreign_cache(os.environ)
import torch._dynamo
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere"), foreign])
def test_a_foreign_file_in_place_of_the_cache_of_compiled_code_is_passed_over(tmp_path: Path, make):
    """In /tmp any user may take the name. The folder in its place goes with the process."""
    make(tmp_path / f"torchinductor_{getpass.getuser()}")
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
