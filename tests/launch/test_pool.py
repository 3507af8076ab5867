"""Ranks of a pool: their places, their ends, what they leave behind, and signals in the middle of a start."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import alive, below

from trainer.launch.pool import Pool, Process, fork
from trainer.process.environment import Place


def pool(folder: Path, world: int, call: Callable[[int], int]) -> Pool:
    place = Place(0, world, 0, world, starts=True)
    return Pool(place, folder, lambda own: fork(own, lambda place: call(place.rank), folder / f"{own.rank}.log"))


def gone(pids: set[int]) -> bool:
    """Wait until all have ended: a kill takes a moment."""
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


def test_ranks_have_places_and_one_file_to_meet_in(tmp_path: Path) -> None:
    whole = Pool(Place(0, 2, 0, 2, starts=True), tmp_path, lambda own: Process(0)).places
    assert whole == [Place(rank, 2, rank, 2, f"{tmp_path}/store", "echelon") for rank in range(2)]
    node = Pool(Place(4, 6, 0, 2, "", "srun", starts=True), tmp_path, lambda own: Process(0)).places
    assert node == [Place(4 + rank, 6, rank, 2, "", "srun") for rank in range(2)]
    place = Place(3, 4, 1, 2, "", "torchrun")  # a launcher has started the others
    assert Pool(place, tmp_path, lambda own: Process(0)).places == [place]


def test_exit_codes_and_output_of_ranks(tmp_path: Path) -> None:
    with pool(tmp_path, 2, lambda rank: print("rank", rank) or 7 * rank) as ranks:
        assert ranks.wait() == {0: 0, 1: 7}
    assert [(tmp_path / f"{rank}.log").read_text() for rank in range(2)] == ["rank 0\n", "rank 1\n"]


def test_a_rank_that_exits_by_itself_says_so(tmp_path: Path) -> None:
    with pool(tmp_path, 1, lambda rank: sys.exit(0)) as ranks:
        assert ranks.wait() == {0: 1}
    assert (tmp_path / "0.log").read_text() == "echelon: rank 0 called sys.exit(0)\n"


@pytest.mark.parametrize("kill", [0, 1])
def test_peers_of_a_failed_rank_are_killed_with_all_that_they_started(tmp_path: Path, kill: int) -> None:
    def call(rank: int) -> int:
        while rank == kill and not ready.exists():
            time.sleep(0.01)
        if rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.fork():
            ready.touch()
        time.sleep(60)
        return 0

    ready, before = tmp_path / "ready", below(os.getpid())
    with pool(tmp_path, 2, call) as ranks:
        assert ranks.wait(60, 0.1) == {kill: -signal.SIGKILL}
        started = below(os.getpid()) - before
    assert len(started) == 3 and gone(started)


def test_ranks_that_take_too_long_are_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    with pool(tmp_path, 2, lambda rank: time.sleep(60) or 0) as ranks:
        assert ranks.wait(0.1) == {}
    assert time.monotonic() - began < 30


def test_what_a_rank_has_started_ends_with_the_pool(tmp_path: Path) -> None:
    def call(rank: int) -> int:
        if not (pid := os.fork()):
            time.sleep(60)
        (tmp_path / "pid").write_text(str(pid))
        return 0

    with pool(tmp_path, 1, call) as ranks:
        assert ranks.wait() == {0: 0}
    assert gone({int((tmp_path / "pid").read_text())})


def test_a_rank_that_can_not_start_ends_those_before(tmp_path: Path) -> None:
    started: list[Process] = []

    def start(place: Place) -> Process:
        if place.rank == 2:
            raise OSError("no process left")
        started.append(fork(place, lambda _: time.sleep(60) or 0))
        return started[-1]

    before = below(os.getpid())
    with pytest.raises(OSError, match="no process left"), Pool(Place(0, 3, 0, 3, starts=True), tmp_path, start):
        pass
    assert len(started) == 2 and below(os.getpid()) == before


def test_an_interrupt_in_the_middle_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    """Python calls functions before and after a fork, and drops what a handler raises in them."""
    armed, before = [True], below(os.getpid())
    os.register_at_fork(before=lambda: armed and armed.pop() and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), pool(tmp_path, 2, lambda rank: time.sleep(60) or 0):
        pass
    assert not armed and below(os.getpid()) == before
