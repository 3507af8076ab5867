"""One writer a run: a second process is refused and told of the first, and a killed one leaves nothing behind."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.checkpoint.lock import is_running, lock, unlock
from trainer.errors import ConfigError

REPO = str(Path(__file__).parents[2])
# A trainer with a forked data worker that outlives it.
HOLDER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer.checkpoint.lock import lock
lock(Path(sys.argv[2]))
worker = os.fork()
if worker:
    print(worker, flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "ckpt" / "run"


def test_a_second_process_is_refused_until_the_first_is_killed(run: Path) -> None:
    command = [sys.executable, "-S", "-E", "-B", "-c", HOLDER, REPO, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        worker = int(first.stdout.readline())
        try:
            for _ in range(2):  # a refusal claims nothing
                message = (
                    f"{run.parent}: process {first.pid} on .* writes the run run; wait for it to end, or use another"
                )
                with pytest.raises(ConfigError, match=message):
                    lock(run)
            lock(run.with_name("other"))
            first.kill()
            first.wait()
            lock(run)
        finally:
            first.kill()
            os.kill(worker, signal.SIGKILL)
    unlock(run)
    unlock(run.with_name("other"))


def test_the_same_process_may_claim_again_and_lets_go(run: Path) -> None:
    """As a notebook that makes a second trainer after a first that failed."""
    lock(run)
    lock(run)
    assert is_running(run)  # and the lock stays: closing a descriptor would drop it
    attempt = [
        sys.executable,
        "-S",
        "-E",
        "-B",
        "-c",
        HOLDER.replace("worker = os.fork()", "sys.exit()"),
        REPO,
        str(run),
    ]
    assert subprocess.run(attempt, check=False, capture_output=True).returncode == 1
    unlock(run)
    assert subprocess.run(attempt, check=False, capture_output=True).returncode == 0
    unlock(run)
    assert not is_running(run)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_can_not_be_locked_a_warning_takes_its_place(run, code, monkeypatch, caplog) -> None:
    def fails(descriptor: int, command: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", fails)
    lock(run)
    assert re.search(r"\.lock: can't be locked \(.*\); make sure that no other process writes this run", caplog.text)
    unlock(run)
