"""Stops: by a signal to a rank that waits for another."""

import os
import re
import signal
import time
from pathlib import Path

from command import popen
from troubled import RUN, pids, troubling


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
