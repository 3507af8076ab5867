"""Trials in forks: failures, kills, hangs and a lack of memory end a trial alone, and leave nothing behind."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.faults import below

from trainer.process.environment import Place
from trainer.tools.tune.team import Team, TrialFailed, free_port, in_a_line


def work(task: dict[str, Any], place: Place) -> dict[str, Any]:
    """Do what the task says on its rank; on the others wait as for a peer, or answer."""
    if task["rank"] not in (place.rank, -1):
        time.sleep(60 if task.get("wait") else 0)
    elif task["what"] == "raise":
        raise ValueError("odd\nmore")
    elif task["what"] == "memory":
        raise MemoryError
    elif task["what"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif task["what"] == "exit":
        os._exit(0)
    elif task["what"] == "child":
        if not os.fork():
            time.sleep(60)
        time.sleep(60)
    elif task["what"] == "hang":
        time.sleep(60)
    return {"rank": place.rank, "pid": os.getpid(), "group": os.getpgid(0), "store": place.store}


@pytest.fixture(params=[2, 3])
def team(request: pytest.FixtureRequest, tmp_path: Path):
    made = Team(Place(0, request.param, 0, request.param, starts=True), tmp_path, work)
    yield made
    made.close()


def fine(team: Team) -> list[dict[str, Any]]:
    return team.run({"rank": -1, "what": "answer"}, 30)


def test_each_rank_answers_from_a_process_of_its_own(team: Team) -> None:
    first, second = fine(team), fine(team)
    assert [answer["rank"] for answer in first] == list(range(team.place.world))
    pids = {answer["pid"] for answer in first + second}
    assert len(pids) == 2 * team.place.world and os.getpid() not in pids
    assert all(answer["group"] == answer["pid"] for answer in first)
    assert len({answer["store"] for answer in first}) == 1 and first[0]["store"] != second[0]["store"]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise", "rank 1: ValueError: odd"),
        ("memory", "rank 1: out of memory"),
        ("exit", "rank 1: ended with code 0"),
        ("kill", "rank 1: was killed by signal 9, as the kernel does when memory runs out"),
    ],
)
def test_a_failure_on_one_rank_ends_the_trial_alone(team: Team, what: str, reason: str) -> None:
    with pytest.raises(TrialFailed) as error:
        team.run({"rank": 1, "what": what, "wait": True}, 30)
    assert str(error.value) == reason
    assert len(fine(team)) == team.place.world


def test_a_hang_ends_at_its_limit_with_all_that_it_started(team: Team) -> None:
    before = below(os.getpid())
    with pytest.raises(TrialFailed, match=r"rank 0: no end within 0\.5 s"):
        team.run({"rank": 0, "what": "child"}, 0.5)
    assert below(os.getpid()) == before
    assert len(fine(team)) == team.place.world


def test_one_rank_needs_no_rank_in_its_message(tmp_path: Path) -> None:
    team = Team(Place(0, 1, 0, 1, starts=True), tmp_path, work)
    with pytest.raises(TrialFailed, match=r"^ValueError: odd$"):
        team.run({"rank": 0, "what": "raise"}, 30)
    team.close()


def test_processes_of_two_nodes_start_two_ranks_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun starts them, with one task on each node."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)

    def team(node: int) -> Team:
        (folder := tmp_path / str(node)).mkdir()
        return Team(Place(2 * node, 4, 0, 2, "", "srun", starts=True), folder, work)

    other = multiprocessing.get_context("fork").Process(target=lambda: team(1).serve())
    other.start()
    try:
        leader, waited = team(0), list[list[str]]()
        assert [answer["rank"] for answer in fine(leader)] == [0, 1, 2, 3]
        store = leader.store
        leader.store = SimpleNamespace(set=store.set, wait=lambda keys, limit: waited.append(keys))
        leader.close()
        store.wait(["left-2"], timedelta(seconds=20))
        other.join(20)
        assert other.exitcode == 0 and waited == [["left-2"]]  # the other process has no further one
    finally:
        other.kill()
        other.join()


def test_an_error_is_one_line() -> None:
    assert in_a_line(RuntimeError("a\x1b[0m\nb")) == "RuntimeError: a?[0m"
    assert in_a_line(MemoryError()) == "out of memory"
