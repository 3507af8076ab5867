"""The process that forks ranks: what it tells of them, and what becomes of them with it. In a run: tests/faults."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli import MAIN, TOY, run
from support.faults import alive, below

from trainer.errors import STOPPED
from trainer.launch.forkserver import ForkServer, Rank, Server, adopt_orphans
from trainer.process.environment import Place

OWN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "ECHELON_STORE": ""}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer([], Place())
    yield server
    server.close()
    assert not alive(server.process.pid)


@pytest.fixture
def resolved() -> Iterator[int]:
    """Of no config: a rank ends with an error of ours."""
    descriptor = os.memfd_create("config")
    yield descriptor
    os.close(descriptor)


def ended(rank: Rank) -> int:
    deadline = time.monotonic() + 60
    while (code := rank.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank.wait()
    assert not rank.pid or not Path(f"/proc/{rank.pid}").exists()
    return code


def forked(rank: Rank) -> int:
    deadline = time.monotonic() + 60
    while rank.pid is None:
        assert rank.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return rank.pid


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[int]:
    """A config with which rank 1 waits for ever for someone who reads its log."""
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "rank1.log")
    descriptor = os.memfd_create("config")
    os.write(descriptor, json.dumps({"config": {"trainer": {"run_dir": str(tmp_path)}}, "spec": None}).encode())
    yield descriptor
    os.close(descriptor)


def outlives(server: ForkServer, waits: int, number: int) -> None:
    """A rank goes on without its server, and its end is told."""
    rank = server.fork(OWN | {"RANK": "1"}, waits, None)
    pid = forked(rank)
    server.process.send_signal(number)
    time.sleep(0.5)
    assert rank.poll() is None and parent(pid) == os.getpid()
    rank.send_signal(signal.SIGTERM)
    assert ended(rank) == STOPPED


def test_what_ranks_print_and_end_with_and_one_outlives_its_server(
    server: ForkServer, resolved: int, waits: int, tmp_path: Path
):
    ranks = []
    for number in range(3):
        env = OWN | {"RANK": str(number), "ECHELON_ERROR_FILE": str(tmp_path / f"error-{number}.json")}
        with open(tmp_path / f"{number}.log", "ab") as log:
            ranks.append(server.fork(env, resolved, log.fileno()))
    assert [ended(rank) for rank in ranks] == [1, 1, 1]
    assert all((tmp_path / f"error-{number}.json").exists() for number in range(3)) and server.process.poll() is None
    assert "Traceback" in (tmp_path / "2.log").read_text()
    assert ended(server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "again.json")}, resolved, None)) == 1
    outlives(server, waits, signal.SIGKILL)


def test_one_that_is_not_there_yet_is_killed_with_the_server(server: ForkServer, resolved: int):
    rank = server.fork(OWN, resolved, None)
    assert rank.poll() is None
    rank.send_signal(signal.SIGTERM)  # no one to hear it
    rank.kill()
    assert ended(rank) == -signal.SIGKILL and not below(os.getpid()) & {server.process.pid}


@pytest.mark.slow
def test_a_rank_outlives_a_server_that_hangs(server: ForkServer, waits: int):
    """The rank is no child of the server, which keeps nothing back."""
    outlives(server, waits, signal.SIGSTOP)


@pytest.mark.slow
def test_no_rank_is_lost_with_a_server_that_is_killed_as_it_forks(server: ForkServer, resolved: int, tmp_path: Path):
    """Each has been forked, and is told of, or never will be."""
    env = OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "error.json")}
    assert ended(server.fork(env, resolved, None)) == 1  # it serves
    before = below(os.getpid())
    ranks = [server.fork(env, resolved, None) for _ in range(20)]
    time.sleep(0.02)
    server.close()
    codes = []
    for rank in ranks:
        rank.kill()
        codes.append(ended(rank))
    assert set(codes) <= {1, -signal.SIGKILL} and not server.starting
    assert not [pid for pid in below(os.getpid()) - before if alive(pid)]


def test_a_parent_that_takes_its_time_to_end_loses_no_rank():
    """It has closed its files, and the rank is not this process's child yet."""
    adopt_orphans(True)
    server: Any = SimpleNamespace(starting=set())
    pid_pipe, write_end = os.pipe()
    if not (between := os.fork()):
        if not (pid := os.fork()):
            os.close(write_end)
            time.sleep(60)
            os._exit(0)
        os.write(write_end, str(pid).encode())
        os.close(write_end)
        time.sleep(0.3)
        os._exit(0)
    os.close(write_end)
    server.starting.add(rank := Rank(server, pid_pipe))
    pid = forked(rank)
    try:
        assert rank.poll() is None and not server.starting
        rank.kill()
        assert ended(rank) == -signal.SIGKILL
    finally:
        os.waitpid(between, 0)
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_orphans_of_ranks_are_not_ours(server: ForkServer, resolved: int, tmp_path: Path):
    """This process would have to reap them."""
    assert ended(server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "error.json")}, resolved, None)) == 1
    out = subprocess.run(["sh", "-c", "sleep 5 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, timeout=60).stdout
    assert parent(int(out)) != os.getpid()
    os.kill(int(out), signal.SIGKILL)


@pytest.mark.slow
def test_exit_codes_are_told_where_sigchld_is_ignored(resolved: int, tmp_path: Path):
    """As a program leaves it to what it starts: the kernel would reap ranks at once."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with contextlib.closing(ForkServer([], Place())) as server:
            assert ended(server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "error.json")}, resolved, None)) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.mark.slow
def test_signals_to_stop_are_for_ranks(server: ForkServer, resolved: int, tmp_path: Path):
    """As from who stops all processes of a job."""
    first = server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "first.json")}, resolved, None)
    assert ended(first) == 1  # it serves
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        server.process.send_signal(number)
    second = server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "second.json")}, resolved, None)
    assert ended(second) == 1 and server.process.poll() is None


def test_a_fork_that_fails_is_reported_as_the_ranks_error(tmp_path, monkeypatch):
    """A pipe without bytes raises in place of `fork`, and as it does: with no frame of its own."""
    monkeypatch.setenv("ECHELON_ERROR_FILE", "")
    reads, writes = os.pipe2(os.O_NONBLOCK)
    try:
        monkeypatch.setattr(os, "fork", partial(os.read, reads, 1))
        Server.__new__(Server)._fork({"ECHELON_ERROR_FILE": str(tmp_path / "error.json")}, writes)
    finally:
        os.close(reads)
        os.close(writes)
    told = json.loads((tmp_path / "error.json").read_text())["text"]
    assert "too few processes and threads may run; raise " in told and "\n" not in told


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to run as another user")
@pytest.mark.parametrize("most", [5, 8])
def test_too_few_processes_for_the_ranks_are_one_line_and_no_restart(tmp_path, most):
    """The limit does not hold for root. Of this user there are no processes but these."""
    user = ["setpriv", "--reuid=54323", "--clear-groups", "--inh-caps=-all,+dac_override"]
    words = [*user, "--ambient-caps=+dac_override", "prlimit", f"--nproc={most}", *MAIN]
    result = run([*TOY, "~callbacks.tensorboard", "trainer.devices=3"], tmp_path, words, HOME=str(tmp_path))
    assert (result.code, result.err.count("\n")) == (1, 1)
    limit = f"ulimit -u={most}, or pids.max of the control group"
    assert result.err.startswith(f"echelon: {limit}: too few processes and threads may run; raise ")
