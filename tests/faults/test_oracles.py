"""What the other tests look for is seen where it is: a process, or folder, left; a moment without a checkpoint."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.cli import MARK, environment
from support.faults import nobody_left, processes, tidy, watched

from trainer.checkpoint.commit import commit


def sleepers(cwd: Path) -> list[int]:
    """Find the processes that have finished their exec of sleep: its words and its environment appear together."""
    return [pid for pid in processes(cwd) if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x0060\0"]


def test_a_process_with_another_parent_and_group_is_left(tmp_path):
    words = ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"]
    subprocess.run(words, env=environment(**{MARK: str(tmp_path)}), check=True)
    deadline = time.monotonic() + 60
    while not sleepers(tmp_path):  # in the middle of an exec a process shows no environment
        assert time.monotonic() < deadline
    (pid,) = processes(tmp_path)
    with pytest.raises(AssertionError, match=str(pid)):
        nobody_left(tmp_path, within_s=0.1)
    os.kill(pid, signal.SIGKILL)
    nobody_left(tmp_path)


@pytest.mark.parametrize("left", ["$TMPDIR/echelon-x", "ckpt/r/.tmp-00000002-1"])
def test_a_folder_that_is_left(tmp_path, left):
    commit(tmp_path / "ckpt" / "r", 1, {"a": memoryview(b"a")}, {})
    (tmp_path / "ckpt" / "r" / ".lock").touch()
    tidy(tmp_path)
    (tmp_path / os.path.expandvars(left)).mkdir()
    with pytest.raises(AssertionError):
        tidy(tmp_path)


@pytest.mark.parametrize("lost", [False, True])
def test_a_moment_without_a_valid_checkpoint(tmp_path, lost):
    cwd = tmp_path / "own"

    def put(step: int) -> None:
        commit(cwd / "ckpt" / "r", step, {"a": memoryview(b"a")}, {})
        time.sleep(0.3)

    def run() -> None:
        with watched(cwd):
            time.sleep(0.1)
            put(1)
            if not lost:
                put(2)
            shutil.rmtree(cwd / "ckpt" / "r" / "step-00000001")
            time.sleep(0.3)
            put(3)

    if lost:
        with pytest.raises(AssertionError):
            run()
    else:
        run()
