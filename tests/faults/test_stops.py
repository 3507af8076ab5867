"""Stops: by a signal to a rank that waits for another, and by SLURM, shortly before a job's time is up."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

from command import ROOT, popen
from troubled import RUN, free_port, pids, troubling, wait_for, whole

SRUN = """#!/bin/sh
shift
export SLURM_NTASKS=3 SLURM_NNODES=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost
for rank in 0 1 2; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    tasks="$tasks $!"
done
highest=0
for task in $tasks; do
    wait "$task"
    code=$?
    if [ $code -gt $highest ]; then highest=$code; fi
done
exit $highest
"""
SCONTROL = """#!/bin/sh
echo "$@" >>called
"""


def test_16_a_signal_to_a_rank_that_waits_for_another(tmp_path):
    process = popen([*RUN, "trainer.max_steps=99999", *troubling("sleep 4", rank=0)], tmp_path)
    assert process.stdout is not None
    try:
        while "about to make trouble" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(1.5)  # until rank 1 waits
        os.kill(pids(tmp_path)[1], signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (75, "")
    heard = logged("SIGTERM: stopping after this step with a checkpoint", tmp_path, rank=1)
    assert heard < logged("trouble is over", tmp_path, rank=0)
    (step,) = re.findall(r"checkpoint  ckpt/r/step-(\d{8})", out)
    assert int(step) in (8, 9)  # a word of step 8 may have been on its way


def logged(what: str, cwd: Path, rank: int) -> str:
    """The time of the line in a rank's log."""
    log = (cwd / "runs" / "r" / "logs" / f"rank{rank}.log").read_text()
    (line,) = [line for line in log.splitlines() if what in line]
    return line[:23]


def test_18_slurm_before_the_time_limit(golden, tmp_path):
    """It signals every process of a job's step; the job is then put back into the queue, and run again."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = str(free_port() - 20000)
    env = {"SLURM_JOB_ID": job, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for arguments, code in (([*RUN, "callbacks.probe.step_s=0.5"], 75), (RUN, 0)):
        process = popen(arguments, tmp_path, ["setsid", "bash", str(ROOT / "scripts" / "slurm.sh")], **env)
        try:
            if code == 75:
                wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
                for pid in [pid for rank in pids(tmp_path) for pid in (rank, *workers(rank))]:
                    os.kill(pid, signal.SIGUSR1)
            _, err = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == code, err
        assert (tmp_path / "called").read_text() == f"requeue {job}\n"
        assert "SIGUSR1: stopping after this step" in (tmp_path / "runs/r/logs/rank2.log").read_text()
    whole(tmp_path, golden)


def workers(rank: int) -> list[int]:
    found = [int(pid) for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
    assert found
    return found
