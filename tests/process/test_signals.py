"""Ctrl-C, SIGTERM, a closed terminal or pipe: training stops with a checkpoint, the same on all ranks, or goes on."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import MAIN, PYTHONPATH, QUICK, TOY, Result, environment, lines, popen, run, weights
from support.faults import free_port

from trainer.process.signals import StartupSignals, StopSignals, undo_inherited

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
    assert result.out.count("SIGINT: stopping after this step with a checkpoint; a second SIGINT stops now\n") == 1
    (command,) = re.findall("^resume with (.*)$", result.out, re.MULTILINE)
    words = shlex.split(command)
    start = words.index("--config-dir")
    assert words[:start] in (MAIN, [str(Path(sys.executable).with_name("echelon"))])
    resumed = run([*words[start:], "callbacks.probe.trouble="], tmp_path)
    assert resumed.code == 0, resumed.err
    assert weights("r", tmp_path, 20) == weights("r", straight, 20)
    assert lines(tmp_path / "runs" / "r") == lines(straight / "runs" / "r")


def test_the_second_ends_it_at_once(tmp_path):
    """Within the first step, which would take longer than the test may."""
    result = stopped("SIGINT SIGINT", 0, tmp_path, "callbacks.probe.step=1", "callbacks.probe.step_s=300")
    assert result.code == 128 + signal.SIGINT
    assert "SIGINT: stopping after this step" in result.out
    assert result.err == "echelon: second signal, stopping now, without a checkpoint\n"
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").glob("*/step-*"))


def test_sighup_is_heeded_but_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals() as ignored:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals() as heeded:
            os.kill(os.getpid(), signal.SIGHUP)
            deadline = time.monotonic() + 60
            while not heeded.name and time.monotonic() < deadline:
                time.sleep(0.01)
        assert (ignored.name, heeded.name) == ("", "SIGHUP")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_parent_has_blocked_or_ignored_is_undone():
    """With SIGCHLD ignored, the exit code of a program would be lost, and it would pass for 0."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    child = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert subprocess.run(["false"]).returncode == 0
        undo_inherited()
        with StopSignals() as heeded:
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + 60
            while not heeded.name and time.monotonic() < deadline:
                time.sleep(0.01)
        assert heeded.name == "SIGUSR1" and subprocess.run(["false"]).returncode == 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, child)


DAEMON = """import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""


@pytest.mark.slow
def test_the_child_of_a_daemon_that_blocks_all_signals_stops_at_sigterm(tmp_path):
    words = [sys.executable, "-c", DAEMON, "-m", "trainer.main"]
    process = popen([*RUN, "callbacks.probe.step_s=0.2", "trainer.max_steps=200"], tmp_path, words)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "runs" / "r" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.terminate()
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert steps(tmp_path) < 200


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR, signal.SIGIO])
def test_what_batch_systems_send_before_they_kill_is_a_signal_to_stop(number):
    before = signal.getsignal(number)
    try:
        signal.signal(number, signal.SIG_DFL)
        with StartupSignals(), StopSignals() as heeded:
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 60
            while not heeded.name and time.monotonic() < deadline:
                time.sleep(0.01)
        assert heeded.name == number.name and signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # a program's own handler stays
        with StopSignals() as heeded:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_IGN
        assert heeded.name == ""
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        pytest.param("parent SIGTERM", "SIGTERM", marks=pytest.mark.slow),
        ("SIGUSR1", "a signal to a rank"),
    ],
)
def test_before_the_first_step_there_is_nothing_to_save(what, told, tmp_path):
    result = stopped(what, 1, tmp_path, "trainer.devices=2", "callbacks.probe.where=startup")
    assert (result.code, result.err) == (75, f"echelon: {told}: stopped before the first step\n")
    assert not list(tmp_path.glob("ckpt/r/step-*")) and not (tmp_path / "runs/r/logs/events.jsonl").exists()


def test_a_rank_that_waits_for_others_is_stopped_at_once(tmp_path):
    """They never come; torch would wait for `timeout_s`."""
    port = free_port()
    waiting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = popen(RUN, tmp_path, **waiting)
    try:
        deadline = time.monotonic() + 60
        while not re.search(rf":{port:04X} 0+:0000 0A ", "".join(map(Path.read_text, Path("/proc/net").glob("tcp*")))):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, err) == (75, "echelon: SIGUSR1: stopped before the first step\n")


Reaction = tuple[str, Callable[[int, int], None]]


def on_a_terminal(cwd: Path, reactions: list[Reaction], *more: str) -> tuple[int, str]:
    """The exit code, and all that was shown. A reaction gets the process and its terminal once its text is shown."""
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [*MAIN, *RUN, *more], cwd=cwd, env=environment(TERM="xterm"), stdin=inside, stdout=inside, stderr=inside,
        start_new_session=True, preexec_fn=own_terminal,  # noqa: PLW1509 two system calls
    )  # fmt: skip
    os.close(inside)
    shown = ""
    while text := read(terminal):
        shown += text
        if reactions and reactions[0][0] in shown:
            reactions.pop(0)[1](process.pid, terminal)
    with contextlib.suppress(OSError):
        os.close(terminal)
    return process.wait(60), shown


def own_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests run under
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # one side is closed
        return ""


def to_workers(pid: int, number: int) -> None:
    for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(worker), number)


def ctrl_c(pid: int, terminal: int) -> None:
    os.write(terminal, b"\x03")
    to_workers(pid, signal.SIGINT)


def sigterm(pid: int, terminal: int) -> None:
    to_workers(pid, signal.SIGTERM)
    time.sleep(0.2)  # they would have ended, before the run knows that it is to stop
    os.killpg(pid, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(("react", "name"), [(ctrl_c, "SIGINT"), (sigterm, "SIGTERM")])
def test_a_signal_to_all_processes_of_a_terminal(react, name, tmp_path):
    """None of the data workers may be lost before the checkpoint, nor be taken for a second signal."""
    code, shown = on_a_terminal(tmp_path, [("loss", react)], "data.workers=2", "callbacks.probe.step_s=0.1")
    assert code == 75, shown
    assert steps(tmp_path) < 20
    assert "Traceback" not in shown
    assert "\x1b[" in shown and re.search("/20.*loss", shown)  # a bar, and what the log says
    assert shown.count(f"{name}: stopping after this step") == 1
    assert "checkpoint  ckpt/r/step-" in shown


@pytest.mark.slow
def test_a_terminal_that_is_closed(tmp_path):
    """Everything that is written to it from then on fails."""
    hang_up = [("loss", lambda pid, terminal: os.close(terminal))]
    code, _ = on_a_terminal(tmp_path, hang_up, "data.workers=2", "callbacks.probe.step_s=0.1")
    log = (tmp_path / "runs" / "r" / "logs" / "rank0.log").read_text()
    assert code == 75, log
    assert steps(tmp_path) < 20
    assert "SIGHUP: stopping after this step with a checkpoint\n" in log
    assert log.count("<stdout> is closed (Input/output error)") == 1


@pytest.mark.slow
def test_the_second_ctrl_c_gives_the_cursor_back(tmp_path):
    """One process, in a step that would take longer than the test may."""
    reactions: list[Reaction] = [("0/20", ctrl_c), ("a second SIGINT stops now", ctrl_c)]
    code, shown = on_a_terminal(tmp_path, reactions, "callbacks.probe.step_s=300")
    assert code == 128 + signal.SIGINT, shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0
    assert shown.count("second signal, stopping now, without a checkpoint") == 1
    assert shown.endswith("\r\n")


@pytest.mark.slow
def test_a_reader_that_goes_away(straight, tmp_path):
    """`| head -1`: training goes on to its end, and the log says so once."""
    words = [*MAIN, *RUN]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
    log = (tmp_path / "runs" / "r" / "logs" / "rank0.log").read_text()
    assert run.returncode == 0, log
    assert log.count("<stdout> is closed (Broken pipe): the run continues") == 1
    assert lines(tmp_path / "runs" / "r") == lines(straight / "runs" / "r")


CHATTY = """
import sys
from toy_recipe import Toy

class Chatty(Toy):
    def loss(self, model, batch):
        print("a recipe's own line")
        print("and another", file=sys.stderr)
        return super().loss(model, batch)
"""


@pytest.mark.slow
def test_a_recipe_may_print_to_a_reader_that_has_gone(tmp_path):
    (tmp_path / "chatty.py").write_text(CHATTY)
    chatty = ["recipe._target_=chatty.Chatty", "trainer.allow_targets=[toy_recipe,probe,chatty]"]
    words, pipe = [*MAIN, *RUN, *chatty, "trainer.max_steps=5"], subprocess.PIPE
    path = os.pathsep.join([str(tmp_path), PYTHONPATH])
    with subprocess.Popen(words, cwd=tmp_path, env=environment(PYTHONPATH=path), stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stderr.close()
        process.stdout.readline()
        process.stdout.close()
    assert process.returncode == 0
    log = (tmp_path / "runs" / "r" / "logs" / "rank0.log").read_text()
    assert log.count("<stdout> is closed (Broken pipe): the run continues") == 1
    assert log.count("<stderr> is closed (Broken pipe): the run continues") == 1


@pytest.mark.slow
def test_standard_error_may_be_a_socket(tmp_path):
    """As systemd gives it: it can't be opened by its path."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ended = subprocess.run(
            [*MAIN, *RUN, "trainer.max_steps=2"], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=theirs, timeout=60,
        )  # fmt: skip
        theirs.close()
        assert (ended.returncode, ours.recv(10_000).decode()) == (0, "")


def test_a_name_that_is_not_utf_8_can_be_shown(tmp_path):
    code = "import sys; from trainer.process.stdio import tolerate_closed_pipes; tolerate_closed_pipes()"
    code += "; print('a\\udcff'); print('a\\udcff', file=sys.stderr)"
    done = run([], tmp_path, [sys.executable, "-c", code], PYTHONIOENCODING="utf-8:strict")
    assert done == (0, "a\\udcff\n", "a\\udcff\n")


def test_nobody_reads_the_help(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*MAIN, "--help"], cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
