"""Stops: by a signal to the launcher, to one rank or to every process; the same or the printed command goes on."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from support.cli import Result, popen, run
from support.faults import (
    RUN,
    alive,
    below,
    has_valid,
    nobody_left,
    pids,
    processes,
    resumed,
    trouble,
    troubling,
    wait_for,
    whole,
)


def stopped(result: Result, cwd: Path) -> int:
    """The step that it has stopped at, with a checkpoint."""
    assert (result.code, result.err) == (75, "")
    summary = json.loads((cwd / "runs" / "r" / "summary.json").read_text())
    assert summary["stopped"] == "signal" and not (cwd / "runs" / "r" / "logs" / "events.jsonl").exists()
    assert os.readlink(cwd / "ckpt" / "last.pt") == f"r/step-{summary['steps']:08d}"
    return summary["steps"]


def go_on(result: Result, cwd: Path, *more: str) -> Result:
    """By the command that it has printed."""
    (command,) = re.findall("^resume with (.*)$", result.out, re.MULTILINE)
    return run([], cwd, [*shlex.split(command), *more], timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_14_15_signals_to_one_rank_and_then_to_the_launcher(golden, tmp_path):
    """Even twice: who ends a whole job sends one to the rank, and the launcher passes on its own."""
    first = trouble("SIGTERM SIGTERM", tmp_path, rank=2, step=3)
    assert stopped(first, tmp_path) in (4, 5)  # rank 0 hears of it in the next step
    second = go_on(first, tmp_path, *troubling("parent SIGUSR1 SIGHUP SIGTERM", step=7), "callbacks.probe.step_s=0.05")
    assert 7 <= stopped(second, tmp_path) < 12
    assert second.out.count("SIGUSR1: stopping after this step with a checkpoint\n") == 1
    assert go_on(second, tmp_path, "callbacks.probe.trouble=").code == 0
    whole(tmp_path, golden)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_14_sigterm_to_every_process(golden, tmp_path):
    """As scancel sends it: to data workers, ranks and the launcher, in any order."""
    process = popen([*RUN, "callbacks.probe.step_s=0.5", "data.workers=2"], tmp_path)
    try:
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        every = sorted(below(process.pid), reverse=True)  # workers first
        assert len(every) >= 3 + 3 * 2
        for pid in (*every, process.pid):
            os.kill(pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (75, "")
    step = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["steps"]
    assert 4 <= step < 12 and (tmp_path / "ckpt" / "r" / f"step-{step:08d}").exists()
    assert not [pid for pid in every if alive(pid)]
    assert run([*RUN, "trainer.resume=auto"], tmp_path).code == 0
    whole(tmp_path, golden)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_4_the_launcher_is_killed_while_a_checkpoint_is_written(golden, tmp_path):
    assert trouble("parent SIGKILL", tmp_path, rank=0, where="mid_write").code == -signal.SIGKILL
    nobody_left(tmp_path)
    assert run([*RUN, "trainer.resume=auto"], tmp_path, timeout_s=110).code == 0
    whole(tmp_path, golden, launchers=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_17_what_a_slow_disk_does_not_take_in_time_is_killed(golden, tmp_path):
    """A signal while a checkpoint is written, which takes longer than there is; then all are killed."""
    slowly = [*RUN, *troubling("sleep 600", rank=0, where="mid_write"), "callbacks.probe.step_s=0.2"]
    process = popen(slowly, tmp_path)
    assert process.stdout is not None
    try:
        said = ""
        while "about to make trouble" not in said:
            said = process.stdout.readline()
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        while "SIGTERM: stopping after this step with a checkpoint" not in said:
            said = process.stdout.readline()
            assert process.poll() is None
        time.sleep(3)
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    nobody_left(tmp_path)
    assert has_valid(tmp_path / "ckpt" / "r")
    assert [path.name for path in (tmp_path / "ckpt" / "r").glob("step-*")] == ["step-00000004"]
    assert list((tmp_path / "ckpt" / "r").glob(".tmp-00000008-*"))
    again = run([*RUN, "trainer.resume=auto"], tmp_path, timeout_s=110)
    assert again.code == 0 and resumed(again.out) == [4]
    whole(tmp_path, golden, launchers=1)


def logged(what: str, cwd: Path, rank: int) -> str:
    """The time of the line in a rank's log."""
    log = (cwd / "runs" / "r" / "logs" / f"rank{rank}.log").read_text()
    (line,) = [line for line in log.splitlines() if what in line]
    return line[:23]
