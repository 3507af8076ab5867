"""scripts/cluster/slurm.sh: what it calls, with commands of SLURM that only note it. tests/launch has a real SLURM."""

import os
import subprocess
from pathlib import Path

import pytest
from support.cli import ROOT

SCRIPT = ROOT / "scripts" / "cluster" / "slurm.sh"
COMMANDS = {
    "scontrol": '[ "$1" = show ] && echo "TaskPlugin              = $PLUGINS" || echo "scontrol $*" >> calls',
    "srun": 'echo "srun $*; $SRUN_CPUS_PER_TASK cores" >> calls; exit $CODE',
}


def calls(folder: Path, plugins: str, code: int = 0) -> list[str]:
    for name, line in COMMANDS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    env = {
        "PLUGINS": plugins,
        "CODE": str(code),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "j",
        "SLURM_CPUS_PER_TASK": "4",
    }
    env |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SCRIPT), "a=b"], cwd=folder, env=env, timeout=30)
    assert done.returncode == code
    return (folder / "calls").read_text().splitlines()


PYTHON = "python -m trainer.main trainer.run_dir=runs/j-7 trainer.resume=auto a=b; 4 cores"


@pytest.mark.parametrize(
    ("plugins", "bind"),
    [("task/affinity,task/cgroup", "--cpu-bind=none "), ("task/cgroup", ""), ("task/none", ""), ("", "")],
)
def test_srun_binds_no_rank_where_it_could(plugins: str, bind: str, tmp_path: Path):
    assert calls(tmp_path, plugins) == [f"srun --kill-on-bad-exit=1 {bind}{PYTHON}"]


def test_a_stopped_job_queues_itself_again(tmp_path: Path):
    assert calls(tmp_path, "task/affinity", 75)[1:] == ["scontrol requeue 7"]
    (tmp_path / "calls").unlink()
    assert len(calls(tmp_path, "task/affinity", 78)) == 1
