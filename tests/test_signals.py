"""Ctrl-C and SIGTERM: a checkpoint at the next step, the same on all ranks, and the command that goes on."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from command import MAIN, QUICK, TOY, Result, environment, lines, run, weights

RUN = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.checkpoint.every_steps=null", "trainer.run_dir=runs/r"]


def stopped(what: str, rank: int, cwd: Path, *more: str) -> Result:
    """A run that gets a signal in step 7 of 20."""
    typed = [f"callbacks.probe.trouble={what}", f"callbacks.probe.rank={rank}", "callbacks.probe.step=7"]
    return run([*RUN, *typed, *more], cwd)


def steps(cwd: Path) -> int:
    """How far the run came, with a checkpoint of that step."""
    summary = json.loads((cwd / "runs" / "r" / "summary.json").read_text())
    assert summary["stopped"] == "signal"
    assert os.readlink(cwd / "ckpt" / "last.pt") == f"r/step-{summary['steps']:08d}"
    return summary["steps"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("straight")
    result = run(RUN, cwd)
    assert result.code == 0, result.err
    return cwd


def test_the_first_ctrl_c_stops_with_a_checkpoint_and_the_printed_command_goes_on(straight, tmp_path):
    result = stopped("SIGINT", 0, tmp_path)
    assert (result.code, result.err) == (75, "")
    assert steps(tmp_path) in (7, 8)  # the signal comes at the end of step 7
    (command,) = re.findall("^go on with  python (-m trainer.main .*)$", result.out, re.MULTILINE)
    resumed = run([], tmp_path, [sys.executable, *shlex.split(command), "callbacks.probe.trouble="])
    assert resumed.code == 0, resumed.err
    assert weights("r", tmp_path, 20) == weights("r", straight, 20)
    assert lines(tmp_path / "runs" / "r") == lines(straight / "runs" / "r")


def test_the_second_ends_it_at_once(tmp_path):
    """Within the first step, which would take longer than the test may."""
    result = stopped("SIGINT SIGINT", 0, tmp_path, "callbacks.probe.step=1", "callbacks.probe.step_s=300")
    assert result.code == 128 + signal.SIGINT
    assert result.err == "echelon: second signal, stopping now, without a checkpoint\n"
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").glob("*/step-*"))


def test_sigterm_to_the_launcher_stops_all_ranks_at_the_same_step(tmp_path):
    result = stopped("'parent SIGTERM'", 1, tmp_path, "trainer.devices=2", "callbacks.probe.step_s=0.05")
    assert (result.code, result.err) == (75, "")
    assert 7 <= steps(tmp_path) < 20


def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path):
    """Even twice: who ends a whole job sends one to the rank, and the launcher passes on its own."""
    result = stopped("SIGTERM SIGTERM", 1, tmp_path, "trainer.devices=2")
    assert (result.code, result.err) == (75, "")
    assert steps(tmp_path) in (8, 9)  # rank 0 hears of it in the next step


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_signal_to_all_processes_of_a_terminal(how, tmp_path):
    """None of the data workers may be lost before the checkpoint, nor be taken for a second signal."""
    terminal, inside = pty.openpty()
    words = [*MAIN, *RUN, "data.workers=2", "callbacks.probe.step_s=0.1"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 one system call
    )  # fmt: skip
    os.close(inside)
    shown = ""
    while text := read(terminal):
        if "loss" not in shown and "loss" in shown + text:
            if how == "SIGTERM":
                os.killpg(process.pid, signal.SIGTERM)
            else:
                os.write(terminal, b"\x03")
                for worker in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    os.kill(int(worker), signal.SIGINT)
        shown += text
    os.close(terminal)
    assert process.wait() == 75, shown
    assert steps(tmp_path) < 20
    assert "Traceback" not in shown
    assert "\x1b[" in shown and re.search("/20.*loss", shown)  # a bar, and what the log says
    assert "checkpoint  ckpt/r/step-" in shown


def read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # the other side is closed
        return ""
