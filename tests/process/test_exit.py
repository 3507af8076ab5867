"""The end of a process: with its threads, its exit functions and its output, without the interpreter's own end."""

import ctypes
import os
import re
import sys
import time
from unittest.mock import Mock

import pytest
from support.cli import ROOT, run

from trainer.errors import ConfigError
from trainer.process.exit import die_with_parent, refuse_exit, run_guarded
from trainer.timeouts import FIRST_RANK_S


def test_a_process_is_left_with_all_but_the_interpreters_own_end():
    """Which would end threads of gloo's, and the process with them."""
    code = """
import atexit, sys, threading, time
from trainer.process.exit import exit_process
class Ended:
    def __del__(self): print("the interpreter ends")
ended = Ended()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
exit_process(7)
"""
    done = run(["-c", code], ROOT, [sys.executable])
    assert done == (7, "a thread\nat exit\n", "")


def stop() -> int:
    raise KeyboardInterrupt


def refuse() -> int:
    raise ConfigError("a=1: is\nwrong; leave it out")


def fail() -> int:
    raise RuntimeError("ours")


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        (lambda: 7, 7, r""),
        (stop, 130, r""),
        (refuse, 78, r"echelon: a=1: is\?wrong; leave it out\n"),
        (fail, 1, r"Traceback .*\nRuntimeError: ours\n+"),
    ],
    ids=["code", "ctrl-c", "mistake", "error"],
)
def test_a_command_ends_with_a_code_and_what_the_user_needs(call, code, said, capsys):
    assert run_guarded(call) == code
    assert re.fullmatch(said, capsys.readouterr().err, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"])
def test_the_first_rank_of_a_node_tells_the_error_and_the_others_wait(name, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for rank in "01":
        monkeypatch.setenv(name, rank)
        run_guarded(refuse)
    assert waits == [FIRST_RANK_S]


def test_a_process_whose_parent_has_ended_ends(monkeypatch):
    """Its number is known from before the fork: later it may be another's."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))  # the kernel is not asked for this process
    die_with_parent(os.getppid())
    die_with_parent()
    assert not ended
    die_with_parent(os.getpid())
    assert ended == [1]


@pytest.mark.parametrize("code", [0, None, "done"])
def test_an_exit_in_a_users_code_is_no_end_of_a_run(code):
    """The command would end with 0, and nothing trained."""
    with pytest.raises(RuntimeError, match=r"^sys\.exit\(.*\) was called in a run; raise an exception"), refuse_exit():
        sys.exit(code)
