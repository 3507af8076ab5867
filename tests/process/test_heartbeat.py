"""A rank that is watched by itself: one that hangs ends, one that was suspended goes on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.process import heartbeat
from trainer.process.heartbeat import Beat, Heartbeat

WATCHED = """
import sys
from trainer.process.heartbeat import Heartbeat
heartbeat = Heartbeat()
heartbeat.watch(1.0, lambda: print("still", flush=True), sys.stderr)
heartbeat.beat(1)
print("begun", flush=True)
sys.stdin.readline()
print("done", flush=True)
"""


def watched() -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", WATCHED], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_rank_that_hangs_tells_its_collectives_then_its_stacks_and_ends():
    with watched() as process:
        assert process.wait(30) == 124 and process.stdout is not None and process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    assert out == "begun\nstill\n"
    assert err.startswith("Timeout (0:00:01)!\n") and 'File "<string>", line 8' in err


def test_time_in_which_a_process_is_suspended_does_not_count():
    process = watched()
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate("\n", timeout=30)
    assert (process.returncode, out.replace("still\n", ""), err) == (0, "done\n", "")


@pytest.mark.parametrize("path", ["gone/heartbeat", "file/heartbeat", "folder"])
def test_a_path_that_leads_nowhere_is_none(tmp_path: Path, path: str):
    """A shell may have the variable of a launcher that has ended."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    beat = Heartbeat(str(tmp_path / path))
    beat.beat(1)
    assert beat.file is None and beat.step == 1 and heartbeat.last(tmp_path / path) is None
    beat.close()


def test_a_heartbeat_tells_the_step_and_that_a_long_one_comes(tmp_path):
    path = tmp_path / "heartbeat"
    assert heartbeat.read(path) is heartbeat.last(path) is None
    beat = heartbeat.Heartbeat(str(path))
    beat.beat()
    assert heartbeat.read(path) is None and told(path)[:2] == (-1, -1)  # not begun
    for step in (4, 5, 6):
        beat.beat(step)
    assert heartbeat.read(path) == told(path) and told(path)[:3] == (4, 6, 0)
    assert 0 <= time.monotonic() - told(path).until < 60
    beat.beat(6, patience_s=1000)
    assert told(path).until > time.monotonic() + 900
    beat.beat(busy=True)
    assert told(path)[:3] == (4, 6, 1)
    heartbeat.Heartbeat("").beat(3)
    path.write_bytes(b"torn")
    assert heartbeat.read(path) is None


def told(path: Path) -> Beat:
    beat = heartbeat.last(path)
    assert beat is not None
    return beat
