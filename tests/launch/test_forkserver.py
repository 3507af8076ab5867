"""The process that forks ranks: what it tells of them, and what becomes of them with it. In a run: tests/faults."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import alive, below

from trainer.launch.forkserver import ForkServer

OWN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "ECHELON_STORE": ""}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer([], {"OMP_NUM_THREADS": "1"})
    yield server
    server.close()
    assert not alive(server.process.pid)


@pytest.fixture
def resolved() -> Iterator[int]:
    """Of no config: a rank ends with an error of ours."""
    descriptor = os.memfd_create("config")
    yield descriptor
    os.close(descriptor)


def ended(rank) -> int:
    deadline = time.monotonic() + 60
    while rank.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return rank.returncode


def test_what_ranks_print_and_end_with(server: ForkServer, resolved: int, tmp_path: Path):
    ranks = []
    for number in range(3):
        env = OWN | {"RANK": str(number), "ECHELON_ERROR_FILE": str(tmp_path / f"error-{number}.json")}
        with open(tmp_path / f"{number}.log", "ab") as log:
            ranks.append(server.fork(env, resolved, log.fileno()))
    assert [ended(rank) for rank in ranks] == [1, 1, 1]
    for rank in ranks:
        rank.kill()  # as the supervisor does in any case
        rank.wait()
    assert all((tmp_path / f"error-{number}.json").exists() for number in range(3)) and not server.dead
    assert "Traceback" in (tmp_path / "2.log").read_text()
    assert ended(server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "again.json")}, resolved, None)) == 1


def test_one_that_is_not_there_yet_is_killed_with_the_server(server: ForkServer, resolved: int):
    rank = server.fork(OWN, resolved, None)
    assert rank.poll() is None
    rank.send_signal(signal.SIGTERM)  # no one to hear it
    rank.kill()
    rank.wait()
    assert rank.returncode == -signal.SIGKILL and server.dead and not below(os.getpid()) & {server.process.pid}


def test_a_server_that_does_not_tell_of_an_end_is_killed(server: ForkServer, tmp_path: Path):
    read, write = os.pipe()  # a rank can't read its config from it, and has ended by then
    rank = server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "error.json")}, read, None)
    deadline = time.monotonic() + 60
    while rank.pid is None:
        assert rank.poll() is None and time.monotonic() < deadline
    server.process.send_signal(signal.SIGSTOP)
    rank.kill()
    began = time.monotonic()
    rank.wait()
    assert rank.returncode == -signal.SIGKILL and server.dead and time.monotonic() - began < 30
    os.close(read)
    os.close(write)


def test_signals_to_stop_are_for_ranks(server: ForkServer, resolved: int, tmp_path: Path):
    """As from who stops all processes of a job."""
    first = server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "first.json")}, resolved, None)
    assert ended(first) == 1  # it serves
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        server.process.send_signal(number)
    second = server.fork(OWN | {"ECHELON_ERROR_FILE": str(tmp_path / "second.json")}, resolved, None)
    assert ended(second) == 1 and not server.dead
