"""When a run whose ranks fail is started again, and when not; what a heartbeat tells. Of ranks: tests/faults."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainer.errors import GAVE_UP, HUNG, STOPPED, UnavailableError, exit_code
from trainer.launch.failure import Failure, find_failure
from trainer.launch.restart_policy import RestartPolicy
from trainer.launch.supervisor import Supervisor
from trainer.process import heartbeat
from trainer.process.environment import Place
from trainer.process.heartbeat import Beat

KILLED = Failure(1, "echelon: rank 1 was killed by SIGKILL; its log: x", 137, False)
RAISED = Failure(1, "Traceback\nRuntimeError: x", 1, True)


def test_restarts_are_used_up_by_what_gets_no_further_and_come_back_with_a_step():
    restarts = RestartPolicy(2)
    failures = [Failure(0, f"echelon: {letter}", 137, False) for letter in "abcdefghi"]  # no two alike
    assert [restarts.decide(failure, Beat(0, 5, 0))[0] for failure in failures[:3]] == [0, 0, 137]
    restarts = RestartPolicy(2)
    assert [restarts.decide(failure, Beat(0, step, 0))[0] for step, failure in enumerate(failures)] == [0] * 9
    code, said = RestartPolicy(0).decide(KILLED, Beat(0, 5, 0))
    assert code == 137 and said == ""


def test_what_another_try_would_meet_again_is_not_tried():
    for code in (70, 71, 78):
        assert RestartPolicy(3).decide(Failure(0, "echelon: x", code, True), Beat(0, 5, 0))[0] == code
    assert RestartPolicy(3).decide(RAISED, Beat(0, 0, 0)) == (1, "")  # not a step was made
    assert RestartPolicy(3).decide(KILLED, Beat(0, 0, 0))[0] == 0  # but a kill may have come from anywhere
    assert RestartPolicy(3).decide(RAISED, None) == (1, "")
    away = Failure(0, "echelon: x", exit_code(UnavailableError("x")), True)
    assert RestartPolicy(3).decide(away, Beat(0, 5, 0))[0] == 0 == RestartPolicy(3).decide(away, Beat(0, 0, 0))[0]
    restarts = RestartPolicy(9)
    assert [restarts.decide(RAISED, Beat(4, 7, 0))[0] for _ in range(3)] == [0, 0, GAVE_UP]


def test_what_was_away_may_be_back_after_a_while():
    """Also before the first step; for as long as any failure, and with time between."""
    restarts = RestartPolicy(3)
    for beat in (Beat(0, 0, 0), None, None):
        assert restarts.decide(Failure(0, "echelon: a.tar: away", 69, True), beat)[0] == 0 and restarts.pause_s == 10
    assert restarts.decide(Failure(0, "echelon: a.tar: away", 69, True), None)[0] == 69


def test_the_same_failure_is_told_by_another_rank_each_time():
    """What differs between ranks and attempts is no part of it: numbers of ranks and processes, addresses, ports."""
    for text in (
        "Traceback {0}\nechelon: out of memory; try a smaller micro_batch\n",
        "echelon: rank {0} was killed by SIGKILL; its log: runs/r/logs/rank{0}.log",
        "RuntimeError: <Batch at 0x7f{1}0> of pid 41{0}: Connection closed by peer [127.0.0.1]:2{0}731",
    ):
        restarts = RestartPolicy(3)
        failures = [Failure(rank, text.format(rank, "abc"[rank]), 137, True) for rank in (0, 1, 2)]
        assert [restarts.decide(failure, Beat(4, 7, 0))[0] for failure in failures] == [0, 0, GAVE_UP]
    restarts = RestartPolicy(3)
    others = [Failure(1, "OSError: [Errno 5] x", 1, True), Failure(1, "echelon: rank 1 ended with code 7", 7, False)]
    others += [Failure(1, "echelon: rank 1 ended with code 8", 8, False)]
    assert [restarts.decide(failure, Beat(4, 7, 0))[0] for failure in others] == [0, 0, 0]


def test_what_never_came_to_a_step_is_no_loop():
    """A node that is short of something when ranks start may have it the next time."""
    restarts = RestartPolicy(3)
    said = [restarts.decide(KILLED, None) for _ in range(4)]
    assert [code for code, _ in said] == [0, 0, 0, 137]
    assert said[0][1] == "echelon: failed before its first step; restart 1 of 3"
    assert said[3][1] == "echelon: 3 restarts came no further than step 0: given up"


def test_pauses_grow():
    restarts, pauses = RestartPolicy(9), []
    for n in range(8):
        restarts.decide(Failure(0, "x" * n, 137, False), Beat(0, 5, 0))
        pauses.append(restarts.pause_s)
    assert pauses == [0, 1, 3, 7, 15, 30, 30, 30]


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


def test_ranks_that_do_not_move_are_seen(tmp_path):
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=0.05, start_s=0.2)
    assert not supervisor._is_still(tmp_path)
    time.sleep(0.1)
    assert not supervisor._is_still(tmp_path)  # none has made its plan, which may take longer
    time.sleep(0.15)
    assert supervisor._is_still(tmp_path)
    supervisor.still_s = 50
    beats = [heartbeat.Heartbeat(str(tmp_path / f"heartbeat-{rank}")) for rank in range(2)]
    beats[0].beat(1)
    assert not supervisor._is_still(tmp_path)
    supervisor.still_s = 0.05
    time.sleep(0.06)
    beats[1].beat(1)  # one of them moves
    assert not supervisor._is_still(tmp_path)
    time.sleep(0.06)
    beats[1].beat(1, patience_s=100)
    assert not supervisor._is_still(tmp_path)
    time.sleep(0.06)
    assert not supervisor._is_still(tmp_path)
    beats[1].beat(2)
    assert not supervisor._is_still(tmp_path)
    for path in tmp_path.glob("heartbeat-*"):
        os.utime(path, (2e9, 2e9))  # what the wall clock says by now may be another time
    time.sleep(0.06)
    assert supervisor._is_still(tmp_path)


class Clock:
    """In place of the module `time`: one that a sleep moves on."""

    def __init__(self, at: Callable[[float], object] = lambda now: None) -> None:
        self.now, self.at = 0.0, at

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at(self.now)


@pytest.mark.parametrize(("moves_s", "ends_s"), [(0, 45), (200, 225)])
def test_rank_0_may_complete_a_checkpoint_as_long_as_that_moves(tmp_path, monkeypatch, moves_s, ends_s):
    """Rank 1 was killed; the disk takes a piece every 30 s until it hangs."""

    def at(now: float) -> None:
        if now // 30 > (now - 0.05) // 30 and now < moves_s:
            beat.beat(busy=True)

    clock = Clock(at)
    monkeypatch.setattr("trainer.launch.supervisor.time", clock)
    monkeypatch.setattr("trainer.process.heartbeat.time", clock)
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=40, start_s=60)
    writes, killed = Mock(**{"poll.return_value": None}), Mock(**{"poll.return_value": -9}, returncode=-9)
    supervisor.ranks = {0: writes, 1: killed}
    beat = heartbeat.Heartbeat(str(tmp_path / "heartbeat-0"))
    beat.beat(7)
    beat.beat(busy=True)
    heartbeat.Heartbeat(str(tmp_path / "heartbeat-1")).beat(7, patience_s=86400)  # what it asked for counts no more
    clock.at = lambda now: (at(now), None if now < 900 else pytest.fail("waits for ever"))
    assert supervisor._wait(tmp_path) == {1: -9}
    writes.send_signal.assert_called_once_with(signal.SIGUSR2)
    assert ends_s <= clock.now < ends_s + 10


@pytest.mark.parametrize("code", [0, STOPPED])
def test_a_rank_that_does_not_end_when_others_have_is_seen(code, tmp_path, monkeypatch):
    """As a thread of the user's may keep it; no collective waits for it any more."""
    clock = Clock(lambda now: None if now < 900 else pytest.fail("waits for ever"))
    monkeypatch.setattr("trainer.launch.supervisor.time", clock)
    monkeypatch.setattr("trainer.process.heartbeat.time", clock)
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=40, start_s=60)
    hangs, ended = Mock(**{"poll.return_value": None}), Mock(**{"poll.return_value": code}, returncode=code)
    supervisor.ranks = {0: ended, 1: ended, 2: hangs, 3: hangs}
    for rank in supervisor.ranks:
        heartbeat.Heartbeat(str(tmp_path / f"heartbeat-{rank}")).beat(7)
    codes = supervisor._wait(tmp_path)
    assert codes == {0: code, 1: code} and 40 <= clock.now < 50
    hangs.send_signal.assert_called_with(signal.SIGUSR2)
    failure = find_failure(codes, supervisor.ranks, tmp_path, Path("logs"), [])
    told = "echelon: rank(s) 2, 3 did not end when the others had; their stacks are in logs"
    assert failure == Failure(2, told, HUNG, False)


def test_all_ranks_are_killed_before_one_is_waited_for(tmp_path, monkeypatch):
    """One that waits for a network's disk can't be killed until that answers."""
    supervisor, done = Supervisor(lambda moved: "", [], Place(0, 3, 0, 3), tmp_path, str, 3, 40, 60), []

    def start(resolved: int, local_rank: int, attempt: int, private: Path) -> None:
        process = Mock(**{"poll.return_value": -9}, returncode=-9)
        process.kill, process.wait = (lambda name=name: done.append(name) for name in ("kill", "wait"))
        supervisor.ranks[local_rank] = process

    monkeypatch.setattr(supervisor, "_start", start)
    assert supervisor._attempt(0) is None
    assert done == ["kill"] * 3 + ["wait"] * 3


LOST = "Connection closed by peer"


@pytest.mark.parametrize(
    ("codes", "own", "rank", "told"),
    [
        ({0: 1, 2: 1}, [], 1, "rank(s) 1 did not end and had to be killed: the likely cause; its log: logs/rank1.log"),
        ({0: 1}, [], 1, "rank(s) 1, 2 did not end and had to be killed: the likely cause; its log: logs/rank1.log"),
        ({0: 1, 1: 1, 2: 0}, [], 2, "rank(s) 2 ended with code 0 before the others: the likely cause; its log: logs"),
        ({0: 1, 2: 0}, [], 2, "rank(s) 2 ended with code 0 before the others"),  # and lets rank 1 wait
        ({0: 1, 1: 1, 2: 1}, [], 0, LOST),
        ({0: 1, 1: 1, 2: 1}, [2], 2, "its own"),  # told late: it had a thread to wait for
        ({0: 1, 2: 1}, [2], 2, "its own"),
        ({0: 1, 1: -9}, [], 1, "rank 1 was killed by SIGKILL; its log: logs/rank1.log"),
    ],
)
def test_who_lets_its_peers_fail_is_told_of(codes, own, rank, told, tmp_path):
    for r, code in codes.items():
        text = "its own" if r in own else LOST
        report = {"time": float(r), "text": text, "code": code, "in_collective": text == LOST}
        if code == 1:
            (tmp_path / f"error-{r}.json").write_text(json.dumps(report))
    failure = find_failure(codes, range(3), tmp_path, Path("logs"), [])
    assert failure is not None and failure.rank == rank and told in failure.text.splitlines()[-1]
    assert failure.reported == (failure.text.splitlines()[-1] in (LOST, "its own"))
